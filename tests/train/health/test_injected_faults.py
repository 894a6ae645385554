import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from train.checkpoint.stores.local import LocalFolder
from train.health.injected_faults import DAMAGES, NAMES, VARIABLE, Faults, damage


def faults(folder: Path, *asked: dict[str, object], rank: int = 0) -> Faults:
    (folder / "marks").mkdir(exist_ok=True)
    env = {VARIABLE: json.dumps({"marks": str(folder / "marks"), "faults": asked})}
    return Faults(env, rank, folder / "checkpoints")


def at(name: str, rank: int = 0, step: int = 3, phase: str = "forward") -> dict[str, object]:
    return {"fault": name, "rank": rank, "step": step, "phase": phase}


def test_nothing_happens_unless_asked_for(tmp_path: Path) -> None:
    Faults({}, 0, tmp_path).strike("forward", 3)


def test_a_fault_strikes_at_its_rank_step_and_phase_and_only_once_in_all_attempts(tmp_path: Path) -> None:
    mine = faults(tmp_path, at("raise"))
    mine.strike("data", 3)
    mine.strike("forward", 2)
    faults(tmp_path, at("raise"), rank=1).strike("forward", 3)
    with pytest.raises(RuntimeError, match="a fault on purpose"):
        mine.strike("forward", 3)
    mine.strike("forward", 3)
    faults(tmp_path, at("raise")).strike("forward", 3)


def test_an_unknown_fault_is_a_mistake_of_the_test(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no_such_fault"):
        faults(tmp_path, at("no_such_fault"))


def test_kill_kills(tmp_path: Path) -> None:
    (tmp_path / "marks").mkdir()
    asked = {VARIABLE: json.dumps({"marks": str(tmp_path / "marks"), "faults": [at("kill")]})}
    code = "from pathlib import Path; from train.health.injected_faults import Faults;"
    code += f"Faults({asked!r}, 0, Path()).strike('forward', 3)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize(("name", "message"), [("no_space", "No space left"), ("io_error", "Input/output error")])
def test_only_the_next_write_of_a_checkpoint_fails(tmp_path: Path, name: str, message: str) -> None:
    faults(tmp_path, at(name)).strike("forward", 3)
    folder = LocalFolder(tmp_path / "step")
    with pytest.raises(OSError, match=message):
        folder.write("shard", [b"1"])
    folder.write("shard", [b"1"])
    assert (tmp_path / "step" / "shard").read_bytes() == b"1"


class Engine:
    """Its gradient is its weight, and it has two of them."""

    def __init__(self) -> None:
        self.weights = {"model.a": torch.ones(4), "model.b": torch.ones(4), "optim.b": torch.ones(4)}

    def state(self) -> dict[str, torch.Tensor]:
        return self.weights

    def forward_backward(self) -> torch.Tensor:
        return self.weights["model.b"].clone()


def test_a_spoiled_gradient_is_not_a_number_once_and_the_weights_are_as_before(tmp_path: Path) -> None:
    engine = Engine()
    spoiled = faults(tmp_path, at("nan_gradient"))
    spoiled.arm(engine)  # pyright: ignore[reportArgumentType]
    spoiled.strike("forward", 3)
    assert not engine.forward_backward().isfinite().all()
    assert engine.forward_backward().equal(torch.ones(4))


def test_a_flipped_weight_changes_one_element_and_stays_finite(tmp_path: Path) -> None:
    engine = Engine()
    flipped = faults(tmp_path, at("flipped_weight"))
    flipped.arm(engine)  # pyright: ignore[reportArgumentType]
    flipped.strike("forward", 3)
    assert engine.weights["model.b"].tolist()[1:] == [1.0, 1.0, 1.0]
    assert 0.0 < abs(engine.weights["model.b"][0].item() - 1.0) < 0.01
    assert engine.weights["model.a"].equal(torch.ones(4))


def test_a_clock_that_jumps_goes_back_two_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", time.time)  # put back afterwards
    before = time.time()
    faults(tmp_path, at("clock_jump")).strike("forward", 3)
    assert time.time() < before - 7000.0


@pytest.mark.parametrize("name", DAMAGES)
def test_each_damage_leaves_another_folder_than_before(tmp_path: Path, name: str) -> None:
    for step in (3, 6):
        (tmp_path / f"step-{step:08d}").mkdir()
        for file in ("manifest.json", "shard-00000.safetensors"):
            (tmp_path / f"step-{step:08d}" / file).write_bytes(bytes(range(200)))

    def contents() -> dict[str, bytes]:
        return {str(p.relative_to(tmp_path)): p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()}

    before = contents()
    changed = damage(tmp_path, name)
    after = contents()
    assert changed is not None
    assert before != after
    assert {path: data for path, data in after.items() if "00003" in path} == {
        path: data for path, data in before.items() if "00003" in path
    }, "only the newest is harmed"


def test_there_is_nothing_to_damage_before_the_first_checkpoint(tmp_path: Path) -> None:
    assert damage(tmp_path, "missing_shard") is None


def test_all_names_are_known_once() -> None:
    assert len(set(NAMES)) == len(NAMES)
