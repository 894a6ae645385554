"""Checkpoints: the manifest, shards of safetensors, the tokenizer's files and the fast tier."""

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import xxhash

from tests.hostile.fuzz.format import Codec, Consumer, Format, RefusedError, command
from tests.hostile.fuzz.formats.checkpoint_codec import (
    MANIFEST,
    header_tree,
    manifest_tree,
    signed,
    with_attachment,
    with_header,
    with_values,
)
from tests.hostile.fuzz.json_text import dumps

CHECKPOINT = "run/checkpoints/step-00000004"
SHARD = f"{CHECKPOINT}/shard-00000.safetensors"
TOKENIZER = f"{CHECKPOINT}/tokenizer/tokenizer.model"
SIZES = {"vocab_size": 320, "seq_len": 16, "n_layers": 1, "n_heads": 2, "d_model": 8, "d_ff": 16}


def build_checkpoint(folder: Path, local: bool = False) -> None:
    """A checkpoint of step 4 with a tokenizer; with `local`, one of step 2 and a copy of step 4 in the fast tier."""
    from data_pipeline.tokenizers.sentencepiece_training import train_sentencepiece
    from tests.data_pipeline.sets import documents

    train_sentencepiece(documents(200), folder / "tokenizer", vocab_size=320)
    for step, in_tier in ((2, False), (4, True)) if local else ((4, False),):
        manager = _manager(folder, local)
        manager.save(_progress(step), state_of(step), {"rank": 0}, local=in_tier)
        manager.close()
    if not local:
        _split_a_tensor(folder / CHECKPOINT)


def build_tier(folder: Path) -> None:
    """A shared checkpoint of step 2, and one of step 4 in the fast tier, in a folder with a fixed name."""
    build_checkpoint(folder, local=True)
    (made,) = (folder / "tier").iterdir()
    made.rename(folder / "tier" / "run")


def _manager(folder: Path, local: bool = False) -> Any:
    from train.checkpoint.format.attachments import plain_files
    from train.checkpoint.manager import CheckpointManager
    from train.config import CheckpointConfig
    from train.model.config import ModelConfig

    tier = str(folder / "tier") if local else None
    return CheckpointManager(
        folder / "run" / "checkpoints",
        CheckpointConfig(background=False, local_dir=tier, keep_last=9),
        {"model": ModelConfig.model_validate(SIZES).model_dump(mode="json")},
        lambda *_, **__: None,
        layout={"engine": "single"},
        attachments=plain_files(folder / "tokenizer"),
    )


def _progress(step: int) -> Any:
    from train.checkpoint.saved_state import SavedProgress

    return SavedProgress(step, 100 * step, 5.5, {"skipped": 0})


def state_of(step: int) -> dict[str, Any]:
    """The state of a small model after a step: each value depends on the step."""
    import torch

    from train.model.config import ModelConfig
    from train.model.gpt import GPT

    with torch.device("meta"):
        model = GPT(ModelConfig.model_validate(SIZES))
    shapes = {f"model.{name}": tuple(parameter.shape) for name, parameter in model.named_parameters()}
    shapes |= {"optim.embed.weight.exp_avg": shapes["model.embed.weight"], "optim.embed.weight.step": ()}
    return {
        name: torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) / 1000 + step + number
        for number, (name, shape) in enumerate(shapes.items())
    }


def _split_a_tensor(checkpoint: Path) -> None:
    """Store a tensor in two pieces, as two ranks would."""
    from train.checkpoint.format.manifest import checksum, decode, encode, shard_header

    manifest = decode((checkpoint / "manifest.json").read_bytes())
    data = (checkpoint / manifest.files[0].name).read_bytes()
    (piece,) = manifest.pieces["model.embed.weight"]
    rows, width = piece.shape
    half = piece.bytes // 2
    first = replace(piece, sizes=(rows // 2, width))
    second = replace(piece, offsets=(rows // 2, 0), sizes=(rows - rows // 2, width), start=piece.start + half)
    parts = [replace(p, checksums=(checksum(data[p.start : p.start + p.bytes]),)) for p in (first, second)]
    pieces = {**manifest.pieces, "model.embed.weight": parts}
    in_order = sorted(chain.from_iterable(pieces.values()), key=lambda p: p.start)
    header, old = shard_header(in_order), manifest.files[0].header_bytes
    file = replace(manifest.files[0], bytes=len(data) - old + len(header), header_bytes=len(header))
    file = replace(file, header_checksum=checksum(header))
    moved = {n: [replace(p, start=p.start - old + len(header)) for p in ps] for n, ps in pieces.items()}
    (checkpoint / file.name).write_bytes(header + data[old:])
    (checkpoint / "manifest.json").write_bytes(encode(replace(manifest, files=[file], pieces=moved)))


def _digest(arrays: dict[str, Any]) -> str:
    parts = {name: (str(a.dtype), a.shape, xxhash.xxh3_64_hexdigest(a.tobytes())) for name, a in sorted(arrays.items())}
    return repr(parts)


def _digest_of_all(arrays: dict[str, Any], names: Iterable[str]) -> str:
    """RefusedError if one is missing: checksums do not say which tensors a model has, so callers look for theirs."""
    if missing := set(names) - arrays.keys():
        raise RefusedError(f"no {min(missing)}")
    return _digest(arrays)


def verified(folder: Path, out: Path) -> str:
    """Whether every byte is right."""
    from train.checkpoint.format.verify import find_faults
    from train.checkpoint.stores.local import LocalFolder

    if faults := find_faults(LocalFolder(folder / CHECKPOINT)):
        raise RefusedError("; ".join(faults))
    return "no faults"


def read_with_numpy(folder: Path, out: Path) -> str:
    """All tensors, read with NumPy alone."""
    from train.checkpoint.format.reader import Reader

    reader = Reader(folder / CHECKPOINT)
    return _digest_of_all({name: reader[name] for name in reader.names()}, state_of(4))


def copied(folder: Path, out: Path) -> str:
    """All tensors of a copy of the checkpoint."""
    from train.checkpoint.format.reader import Reader
    from train.checkpoint.stores.copy import copy
    from train.checkpoint.stores.local import LocalFolder, LocalRoot

    made = copy(LocalFolder(folder / CHECKPOINT), LocalRoot(out / "checkpoints"))
    reader = Reader(Path(str(made)))
    return _digest_of_all({name: reader[name] for name in reader.names()}, state_of(4))


def trained(folder: Path, out: Path) -> str:
    """The model and the tokenizer as `generate` and `export` load them."""
    from train.export.trained_model import open_trained

    with open_trained(folder / CHECKPOINT) as opened:
        ids = opened.tokenizer.encode("the cat sat")
        files = sorted(path.name for path in opened.tokenizer_dir.iterdir())
        return _digest({n: p.detach().numpy() for n, p in opened.model.named_parameters()}) + f"{ids} {files}"


def imported(folder: Path, out: Path) -> str:
    """The weights as `keepstep checkpoint import --from keepstep` reads them."""
    from train.checkpoint.importing.importers import read_source

    source = read_source("keepstep", folder / CHECKPOINT)
    weights = [name.removeprefix("model.") for name in state_of(4) if name.startswith("model.")]
    return _digest_of_all({name: tensor.numpy() for name, tensor in source.weights.items()}, weights)


def listed(folder: Path, out: Path) -> str:
    """Whether the commands show the checkpoint."""
    command("checkpoint", "show", str(folder / CHECKPOINT), "--tensors")
    command("checkpoint", "ls", str(folder / "run"))
    command("checkpoint", "show", str(folder / CHECKPOINT), "--json")
    return "shown"


def resumed(folder: Path, out: Path) -> str:
    """All tensors as a resumed run loads them."""
    state = {name: tensor * 0 for name, tensor in state_of(4).items()}
    manager = _manager(folder)
    loaded = manager.load_newest(state)
    manager.close()
    return _digest({name: tensor.numpy() for name, tensor in state.items()}) + f"{loaded is not None}"


def resumed_from_tier(folder: Path, out: Path) -> str:
    """Whether the tensors that a run loads are those of one step: of the fast tier, or of the shared one before it."""
    from train.checkpoint.local_tier import run_name

    (folder / "tier" / "run").rename(folder / "tier" / run_name(str(folder / "run" / "checkpoints")))
    state = {name: tensor * 0 for name, tensor in state_of(4).items()}
    manager = _manager(folder, local=True)
    loaded = manager.load_newest(state)
    manager.close()
    assert loaded is not None, "nothing was loaded"
    found = _digest({name: tensor.numpy() for name, tensor in state.items()})
    steps = [step for step in (2, 4) if _digest({n: t.numpy() for n, t in state_of(step).items()}) == found]
    return "the tensors of one step" if steps == [loaded.progress.step] else f"other tensors: {steps}"


JSON_SIGNED = Codec(manifest_tree, signed)
UNSIGNED = Codec(json.loads, lambda files, name, tree: {name: dumps(tree)}, is_signed=False)
READ = [
    Consumer("verify", verified, errors=(RefusedError,)),
    Consumer("numpy", read_with_numpy, errors=(ValueError, OSError, RefusedError)),
    Consumer("copy", copied, errors=(RefusedError,)),
    Consumer("trained", trained),
    Consumer("import", imported, errors=(RefusedError,)),
    Consumer("show", listed, errors=(RefusedError,)),
    Consumer("resume", resumed),
]
TIER = "tier/run/step-00000004"

FORMATS = [
    Format(
        "checkpoint-manifest",
        build_checkpoint,
        [(MANIFEST, JSON_SIGNED), (MANIFEST, JSON_SIGNED), (MANIFEST, UNSIGNED)],
        READ,
        "facts that no tensor depends on: tokens, losses, times, versions, settings that shapes do not show",
    ),
    Format(
        "checkpoint-shard",
        build_checkpoint,
        [(SHARD, Codec(header_tree, with_header)), (SHARD, None)],
        READ,
        "nothing",
    ),
    Format(
        "checkpoint-values",
        build_checkpoint,
        [(SHARD, Codec(bytes, with_values))],
        [replace(consumer, exact=False) for consumer in READ],
        "the tensors: whoever can compute all checksums can make another checkpoint",
    ),
    Format(
        "checkpoint-tokenizer",
        build_checkpoint,
        [(TOKENIZER, Codec(bytes, with_attachment)), (TOKENIZER, None)],
        [replace(consumer, exact=consumer.name not in ("trained",)) for consumer in READ],
        "the tokenizer, if all checksums are computed again",
    ),
    Format(
        "checkpoint-tier",
        build_tier,
        [(f"{TIER}/manifest.json", Codec(manifest_tree, signed)), (f"{TIER}/{Path(SHARD).name}", None)],
        [Consumer("resume-tier", resumed_from_tier)],
        "the copy: a damaged one is left for the shared checkpoint before it",
    ),
]
