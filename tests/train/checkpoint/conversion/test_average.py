"""An average of checkpoints is the mean of their weights, is read like a checkpoint, and is made with little memory."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_pipeline.tokenizers.sentencepiece_training import train_sentencepiece
from launch.cli import main
from train.checkpoint.conversion import stored_tensors
from train.checkpoint.conversion.average import shares_of
from train.checkpoint.conversion.stored_tensors import StoredTensors
from train.checkpoint.format.attachments import plain_files
from train.checkpoint.format.reader import Reader
from train.checkpoint.manager import CheckpointManager, SavedProgress
from train.checkpoint.stores.local import LocalFolder
from train.config import CheckpointConfig, Recipe
from train.model.gpt import GPT
from train.optim.groups import build_optimizer
from train.start import identity_of

RECIPE: dict[str, Any] = {
    "name": "small",
    "model": {"vocab_size": 320, "seq_len": 32, "n_layers": 1, "n_heads": 2, "d_model": 16},
    "data": {"sources": [{"path": "a-data-set-that-is-gone"}]},
    "optim": {"lr": 1e-3, "warmup_steps": 0},
    "train": {"steps": 9, "global_batch_size": 1, "micro_batch_size": 1},
}


def save(run: Path, step: int, tokenizer: Path | None = None, **model: Any) -> Path:
    """Save a checkpoint of weights and moments that the step decides; returns it."""
    recipe = Recipe.model_validate(RECIPE | {"model": RECIPE["model"] | model})
    torch.manual_seed(step)
    network = GPT(recipe.model)
    optimizer = build_optimizer(network, recipe.optim)
    optimizer.create_state()
    state: dict[str, Any] = {}
    for name, parameter in network.named_parameters():
        state[f"model.{name}"] = parameter.detach()
        state |= {f"optim.{name}.{kind}": tensor for kind, tensor in optimizer.state[parameter].items()}
    manager = CheckpointManager(
        run / "checkpoints",
        CheckpointConfig(background=False, keep_last=99),
        identity_of(recipe),
        lambda *_, **__: None,
        recipe=recipe.model_dump(mode="json"),
        attachments={} if tokenizer is None else plain_files(tokenizer),
    )
    manager.save(SavedProgress(step, 32 * step, 2.5), state, {})
    manager.close()
    return run / "checkpoints" / f"step-{step:08d}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("average")
    train_sentencepiece(["the cat sat on the mat; the dog sat\n"] * 50, root / "tokenizer", vocab_size=290)
    for step in (2, 4, 6, 8):
        save(root / "run", step, root / "tokenizer")
    return root / "run"


def weights(checkpoint: Path) -> dict[str, Any]:
    reader = Reader(checkpoint)
    return {name: reader[name] for name in reader.names() if name.startswith("model.")}


def test_shares_add_up_to_one_and_decay_backwards() -> None:
    assert shares_of(4, 1.0) == (0.25, 0.25, 0.25, 0.25)
    assert shares_of(3, 0.5) == pytest.approx((1 / 7, 2 / 7, 4 / 7))


@pytest.mark.parametrize(
    ("options", "steps", "shares"),
    [
        (["--last", "3"], (4, 6, 8), (1 / 3, 1 / 3, 1 / 3)),
        (["--steps", "8,2"], (2, 8), (0.5, 0.5)),
        (["--last", "3", "--decay", "0.5"], (4, 6, 8), (1 / 7, 2 / 7, 4 / 7)),
    ],
)
def test_the_weights_are_the_mean_and_nothing_else_is_in_it(
    options: list[str], steps: tuple[int, ...], shares: tuple[float, ...], run: Path, tmp_path: Path
) -> None:
    assert main(["checkpoint", "average", str(run), str(tmp_path / "averaged"), *options]) == 0
    made = tmp_path / "averaged" / "checkpoints" / "step-00000008"
    assert main(["checkpoint", "verify", str(made)]) == 0
    found, sources = weights(made), [weights(run / "checkpoints" / f"step-{step:08d}") for step in steps]
    assert set(Reader(made).names()) == set(found) == set(sources[0])
    for name, value in found.items():
        mean = sum(share * source[name].astype(np.float64) for share, source in zip(shares, sources, strict=True))
        np.testing.assert_allclose(value, mean, rtol=1.2e-7, atol=1e-12, err_msg=name)  # the rounding to fp32
    facts = Reader(made).manifest
    assert facts["extra"]["averaged"]["steps"] == list(steps)
    assert (facts["step"], facts["tokens"], facts["validation_loss"]) == (8, 256, None)


def test_the_average_is_generated_from_and_exported_and_a_new_run_starts_from_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    averaged = tmp_path / "averaged"
    assert main(["checkpoint", "average", str(run), str(averaged), "--last", "2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"path": f"{averaged}/checkpoints/step-00000008", "steps": [6, 8], "shares": [0.5, 0.5]}
    assert main(["generate", str(averaged), "--prompt", "the cat", "--tokens", "3"]) == 0
    assert main(["export", str(averaged), "--out", str(tmp_path / "exported"), "--check"]) == 0
    assert main(["checkpoint", "import", str(averaged), str(tmp_path / "new"), "--from", "keepstep"]) == 0
    started = weights(tmp_path / "new" / "checkpoints" / "step-00000000")
    for name, value in weights(averaged / "checkpoints" / "step-00000008").items():
        np.testing.assert_array_equal(started[name], value)


def test_a_run_does_not_resume_from_an_average_and_names_the_way(run: Path, tmp_path: Path) -> None:
    from train.checkpoint.load import check_tensors
    from train.errors import CheckpointError

    assert main(["checkpoint", "average", str(run), str(tmp_path / "averaged"), "--last", "2"]) == 0
    manifest = StoredTensors(LocalFolder(tmp_path / "averaged" / "checkpoints" / "step-00000008")).manifest
    with pytest.raises(CheckpointError, match=r"is an average of weights, .*checkpoint import AVERAGE RECIPE RUN"):
        check_tensors(manifest, {name: torch.zeros(1) for name in manifest.pieces})


def test_the_average_of_equal_weights_is_the_same_to_the_bit(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    for step in (2, 4, 6):
        shutil.rmtree(checkpoints / f"step-{step:08d}")
    for step in (2, 4):  # other steps with the weights of step 8
        manager = CheckpointManager(
            checkpoints,
            CheckpointConfig(background=False, keep_last=99),
            StoredTensors(LocalFolder(checkpoints / "step-00000008")).manifest.identity,
            lambda *_, **__: None,
        )
        whole = {name: torch.from_numpy(value) for name, value in weights(checkpoints / "step-00000008").items()}
        manager.save(SavedProgress(step, 1), whole, {})
        manager.close()
    assert main(["checkpoint", "average", str(tmp_path / "run"), str(tmp_path / "out"), "--last", "3"]) == 0
    made = weights(tmp_path / "out" / "checkpoints" / "step-00000008")
    for name, value in weights(checkpoints / "step-00000008").items():
        np.testing.assert_array_equal(made[name], value)


BAD = {
    "none": ([], "give one of --steps A,B,C and --last N"),
    "both": (["--steps", "2,4", "--last", "2"], "give one of --steps"),
    "words": (["--steps", "a,b"], "--steps (a,b) must be steps"),
    "one": (["--steps", "2"], "--steps (2) must have at least two"),
    "twice": (["--steps", "2,2"], "--steps (2,2) must have at least two steps, each once"),
    "missing": (["--steps", "2,3"], "there is no checkpoint of step 3"),
    "few": (["--last", "5"], "--last (5) is more than the 4 checkpoints"),
    "decay": (["--last", "2", "--decay", "1.5"], "--decay (1.5) must be a number from 0.001 to 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_are_refused_in_one_line_and_leave_nothing(
    case: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, message = BAD[case]
    assert main(["checkpoint", "average", str(run), str(tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", ["truncated", "changed", "tokenizer", "model", "shape", "target"])
def test_damaged_or_unlike_checkpoints_are_refused_in_one_line_and_leave_nothing(
    fault: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "run")
    checkpoint, target = tmp_path / "run" / "checkpoints" / "step-00000006", tmp_path / "out"
    shard = checkpoint / "shard-00000.safetensors"
    match fault:
        case "truncated":
            shard.write_bytes(shard.read_bytes()[:-1])
            expected = "step-00000006 is damaged: shard-00000.safetensors: has"
        case "changed":  # the first weights, so that some of the average is written before the damage is found
            content = bytearray(shard.read_bytes())
            piece = Reader(checkpoint).manifest["tensors"]["model.norm.weight"]["pieces"][0]
            content[piece["start"]] ^= 1
            shard.write_bytes(content)
            expected = "step-00000006 is damaged"
        case "tokenizer":
            newest = tmp_path / "run" / "checkpoints" / "step-00000008"
            (newest / "tokenizer" / "tokenizer.model").write_bytes(b"")
            expected = "tokenizer/tokenizer.model"
        case "model":
            shutil.rmtree(checkpoint)
            save(tmp_path / "run", 6, rope_theta=500.0)
            expected = "are not of one model: model.rope_theta is 500.0 and 10000.0"
        case "shape":
            shutil.rmtree(checkpoint)
            save(tmp_path / "run", 6, n_layers=2)
            expected = "are not of one model: model.n_layers is 2 and 1"
        case _:
            target = tmp_path / "run"
            expected = "has a checkpoint of step 8; name the folder of a new run"
    before = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    capsys.readouterr()
    assert main(["checkpoint", "average", str(tmp_path / "run"), str(target), "--last", "2"]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == before


def test_rows_are_read_from_pieces_that_are_cut_by_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from train.checkpoint.format.manifest import Manifest, Piece, encode
    from train.checkpoint.shard_writer import write_shard

    whole = torch.arange(35.0).view(7, 5)
    boxes = [((0, 0), (3, 2)), ((0, 2), (3, 3)), ((3, 0), (4, 5))]
    parts = [
        (
            Piece("model.w", "F32", (7, 5), offsets, sizes),
            whole[offsets[0] : offsets[0] + sizes[0], offsets[1] : offsets[1] + sizes[1]],
        )
        for offsets, sizes in boxes
    ]
    folder = LocalFolder(tmp_path / "checkpoint")
    file, pieces = write_shard(folder, "shard-00000.safetensors", parts)
    facts: dict[str, Any] = {name: {} for name in ("extra", "identity", "layout", "versions")}
    manifest = Manifest(
        step=1, tokens=1, validation_loss=None, rank_states=[], saved_at="", files=[file], pieces={"model.w": pieces},
        **facts,
    )  # fmt: skip
    folder.write("manifest.json", [encode(manifest)])
    stored = StoredTensors(folder)
    assert torch.equal(stored.whole("model.w"), whole)
    assert torch.equal(stored.rows("model.w", 2, 5), whole[2:5])
    monkeypatch.setattr(stored_tensors, "ROWS_ELEMENTS", 10)
    assert stored_tensors.row_ranges((7, 5)) == [(0, 2), (2, 4), (4, 6), (6, 7)]


MEMORY = """
import resource, sys
from pathlib import Path
import torch
from train.checkpoint.conversion.average import average
from train.checkpoint.manager import CheckpointManager, SavedProgress
from train.checkpoint.stores.local import LocalRoot
from train.config import CheckpointConfig
root, rows = Path(sys.argv[1]), int(sys.argv[2])
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def manager(where):
    config = CheckpointConfig(background=False, keep_last=9)
    return CheckpointManager(where, config, {"model": {}}, lambda *_, **__: None)
if rows:
    for step in (1, 2, 3):
        saver = manager(root / "run" / "checkpoints")
        saver.save(SavedProgress(step, 1), {f"model.{n}": torch.full((rows, 512), float(step)) for n in "ab"}, {})
        saver.close()
else:
    before = peak()
    average(LocalRoot(root / "run" / "checkpoints"), [1, 2, 3], 1.0, str(root / "out"))
    print(peak() - before)
"""


def test_the_memory_of_an_average_stays_below_two_of_the_largest_tensors(tmp_path: Path) -> None:
    rows = 16384
    largest = rows * 512 * 4
    for argument in (str(rows), "0"):  # the process that saves holds whole tensors, so another one averages
        command = [sys.executable, "-c", MEMORY, str(tmp_path), argument]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    assert int(done.stdout) < 2 * largest
    made = Reader(tmp_path / "out" / "checkpoints" / "step-00000003")
    assert np.all(made["model.a"] == 2.0)
