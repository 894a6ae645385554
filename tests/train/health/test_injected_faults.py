import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from train.checkpoint.stores.local import LocalFolder
from train.errors import ConfigError
from train.health.injected_faults import DAMAGES, NAMES, VARIABLE, FaultInjector, damage_newest_checkpoint


def injector(folder: Path, *requested: dict[str, object], rank: int = 0) -> FaultInjector:
    (folder / "marks").mkdir(exist_ok=True)
    env = {VARIABLE: json.dumps({"marks": str(folder / "marks"), "faults": requested})}
    return FaultInjector(env, rank, folder / "checkpoints")


def at(name: str, rank: int = 0, step: int = 3, phase: str = "forward") -> dict[str, object]:
    return {"fault": name, "rank": rank, "step": step, "phase": phase}


def test_nothing_is_injected_by_default(tmp_path: Path) -> None:
    FaultInjector({}, 0, tmp_path).inject("forward", 3)


def test_a_fault_is_injected_at_its_rank_step_and_phase_and_once_over_all_attempts(tmp_path: Path) -> None:
    first = injector(tmp_path, at("raise"))
    first.inject("data", 3)
    first.inject("forward", 2)
    injector(tmp_path, at("raise"), rank=1).inject("forward", 3)
    with pytest.raises(RuntimeError, match="injected fault"):
        first.inject("forward", 3)
    first.inject("forward", 3)
    injector(tmp_path, at("raise")).inject("forward", 3)


def test_an_unknown_fault_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no_such_fault"):
        injector(tmp_path, at("no_such_fault"))


def test_the_fault_kill_ends_the_process(tmp_path: Path) -> None:
    (tmp_path / "marks").mkdir()
    env = {VARIABLE: json.dumps({"marks": str(tmp_path / "marks"), "faults": [at("kill")]})}
    code = "from pathlib import Path; from train.health.injected_faults import FaultInjector;"
    code += f"FaultInjector({env!r}, 0, Path()).inject('forward', 3)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize(("name", "message"), [("no_space", "No space left"), ("io_error", "Input/output error")])
def test_only_the_next_write_of_a_checkpoint_fails(tmp_path: Path, name: str, message: str) -> None:
    injector(tmp_path, at(name)).inject("forward", 3)
    folder = LocalFolder(tmp_path / "step")
    with pytest.raises(OSError, match=message):
        folder.write("shard", [b"1"])
    folder.write("shard", [b"1"])
    assert (tmp_path / "step" / "shard").read_bytes() == b"1"


class Engine:
    """Has two weights; the gradient of each equals the weight."""

    def __init__(self) -> None:
        self.weights = {"model.a": torch.ones(4), "model.b": torch.ones(4), "optim.b": torch.ones(4)}

    def state(self) -> dict[str, torch.Tensor]:
        return self.weights

    def forward_backward(self) -> torch.Tensor:
        return self.weights["model.b"].clone()


def test_one_gradient_is_nan_and_the_weights_stay_unchanged(tmp_path: Path) -> None:
    engine = Engine()
    faults = injector(tmp_path, at("nan_gradient"))
    faults.attach(engine)  # pyright: ignore[reportArgumentType]
    faults.inject("forward", 3)
    assert not engine.forward_backward().isfinite().all()
    assert engine.forward_backward().equal(torch.ones(4))


def test_a_flipped_bit_changes_one_element_which_stays_finite(tmp_path: Path) -> None:
    engine = Engine()
    faults = injector(tmp_path, at("flipped_weight"))
    faults.attach(engine)  # pyright: ignore[reportArgumentType]
    faults.inject("forward", 3)
    assert engine.weights["model.b"].tolist()[1:] == [1.0, 1.0, 1.0]
    assert 0.0 < abs(engine.weights["model.b"][0].item() - 1.0) < 0.01
    assert engine.weights["model.a"].equal(torch.ones(4))


def test_the_fault_clock_jump_sets_the_clock_back_two_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", time.time)  # restores it afterwards
    before = time.time()
    injector(tmp_path, at("clock_jump")).inject("forward", 3)
    assert time.time() < before - 7000.0


@pytest.mark.parametrize("name", DAMAGES)
def test_each_damage_changes_only_the_newest_checkpoint(tmp_path: Path, name: str) -> None:
    for step in (3, 6):
        (tmp_path / f"step-{step:08d}").mkdir()
        for file in ("manifest.json", "shard-00000.safetensors"):
            (tmp_path / f"step-{step:08d}" / file).write_bytes(bytes(range(200)))

    def contents() -> dict[str, bytes]:
        return {str(p.relative_to(tmp_path)): p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()}

    before = contents()
    changed = damage_newest_checkpoint(tmp_path, name)
    after = contents()
    assert changed is not None
    assert before != after
    assert {path: data for path, data in after.items() if "00003" in path} == {
        path: data for path, data in before.items() if "00003" in path
    }, "only the newest checkpoint is damaged"


def test_before_the_first_checkpoint_nothing_is_damaged(tmp_path: Path) -> None:
    assert damage_newest_checkpoint(tmp_path, "missing_shard") is None


def test_all_names_are_different() -> None:
    assert len(set(NAMES)) == len(NAMES)
