"""Checkpoints of other systems: Hugging Face, torch's DCP and DeepSpeed's universal folders; and small text files."""

import json
from pathlib import Path
from typing import Any

from tests.hostile.fuzz.format import Codec, Consumer, Files, Format, RefusedError
from tests.hostile.fuzz.formats.checkpoints import SIZES, state_of
from tests.hostile.fuzz.formats.recipes import RECIPE
from tests.hostile.fuzz.json_text import dumps

INDEX = "model.safetensors.index.json"
JSON = Codec(json.loads, lambda files, name, tree: {name: dumps(tree)})


def build_hugging_face(folder: Path) -> None:
    """A Llama in two files with an index."""
    from safetensors.torch import load_file, save_file

    from train.export.hugging_face import write_model
    from train.model.config import ModelConfig

    weights = {name.removeprefix("model."): value for name, value in state_of(1).items() if name.startswith("model.")}
    write_model(weights, ModelConfig(**SIZES), SIZES["vocab_size"], 2, folder, None)  # pyright: ignore[reportArgumentType]
    found = sorted(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    places: dict[str, str] = {}
    for number, part in enumerate((found[:4], found[4:]), 1):
        name = f"model-0000{number}-of-00002.safetensors"
        save_file(dict(part), folder / name, metadata={"format": "pt"})
        places |= {tensor: name for tensor, _ in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))


def build_dcp(folder: Path) -> None:
    """A folder of torch.distributed.checkpoint, and the recipe of its model."""
    import torch.distributed.checkpoint as dcp

    dcp.save(_state(), checkpoint_id=folder, no_dist=True)
    _write_recipe(folder)


def build_universal(folder: Path) -> None:
    """A universal folder of DeepSpeed, and the recipe of its model."""
    import torch

    for name, tensor in _state().items():
        (folder / "step4" / "zero" / name).mkdir(parents=True)
        torch.save({"param": tensor}, folder / "step4" / "zero" / name / "fp32.pt")
    (folder / "latest_universal").write_text("step4")
    _write_recipe(folder)


def _state() -> dict[str, Any]:
    return {name.removeprefix("model."): value for name, value in state_of(1).items() if name.startswith("model.")}


def _write_recipe(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(json.dumps(RECIPE | {"model": SIZES}))


def _header(data: bytes) -> Any:
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def _with_header(files: Files, name: str, tree: Any) -> dict[str, bytes]:
    """The safetensors file with another header."""
    length = int.from_bytes(files[name][:8], "little")
    text = dumps(tree)
    return {name: len(text).to_bytes(8, "little") + text + files[name][8 + length :]}


def importing(kind: str, *, trust: bool = False, unpickles: tuple[str, ...] = ()) -> Consumer:
    """The import of a folder of this kind."""

    def call(folder: Path, out: Path) -> str:
        from train.checkpoint.importing.importers import Request, import_checkpoint

        recipe = None if kind == "huggingface" else str(folder / "recipe.yaml")
        made = import_checkpoint(Request(kind, folder, recipe, str(out / "run"), trust=trust))
        return f"step {made.step}"

    return Consumer(f"import-{kind}", call, exact=False, unpickles=unpickles)


def unasked(kind: str) -> Consumer:
    """The import without permission to unpickle: nothing is read."""

    def call(folder: Path, out: Path) -> str:
        from train.checkpoint.importing.importers import Request, import_checkpoint
        from train.errors import CheckpointError

        try:
            import_checkpoint(Request(kind, folder, str(folder / "recipe.yaml"), str(out / "run")))
        except CheckpointError as error:
            return "refused" if "--trust" in str(error) else str(error)
        return "imported"

    return Consumer(f"untrusted-{kind}", call)


def site(folder: Path, out: Path) -> str:
    """The settings of a Slurm site."""
    from launch.clusters.slurm import read_site

    return repr(read_site(folder / "site.env"))


def build_site(folder: Path) -> None:
    """The file of a Slurm site."""
    (folder / "site.env").write_text('PARTITION=gpu\nGPUS_PER_NODE=8  # each\nNODE_SETUP="module load python"\n')


SOURCE = "everything: values are the source's; names, shapes and sizes are checked"
SHARD = "model-00001-of-00002.safetensors"
PICKLES = "everything: the source is unpickled only if the user trusts it (--trust)"
DCP = (
    "collections", "pathlib", "torch", "torch.serialization", "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.metadata",
)  # fmt: skip
"""Modules of the classes that the metadata of DCP has."""
CODE = (b"cos\nsystem\n(S'touch canary'\ntR.", b"cbuiltins\nexec\n(S'1'\ntR.", b"ctorch\nload\n(S'canary/secret'\ntR.")
"""Pickles that run code."""

FORMATS = [
    Format(
        "import-huggingface",
        build_hugging_face,
        [("config.json", JSON), (INDEX, JSON), (SHARD, Codec(_header, _with_header)), (SHARD, None)],
        [importing("huggingface")],
        SOURCE,
    ),
    Format(
        "import-dcp",
        build_dcp,
        [(".metadata", None), ("__0_0.distcp", None)],
        [importing("dcp", unpickles=DCP)],
        SOURCE,
        texts=CODE,
    ),
    Format(
        "import-universal",
        build_universal,
        [("latest_universal", None), ("step4/zero/norm.weight/fp32.pt", None)],
        [unasked("universal"), importing("universal", trust=True, unpickles=("*",))],
        PICKLES,
    ),
    Format(
        "site",
        build_site,
        [("site.env", None)],
        [Consumer("site", site, exact=False, errors=(RefusedError,))],
        "settings: the file is the user's",
    ),
]
