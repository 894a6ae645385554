"""The fast tier over three nodes of one rank each survives the loss of nodes and shards."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from train.checkpoint.local_tier import run_name
from train.checkpoint.manager import CheckpointManager, SavedProgress, SavingFailedError
from train.config import CheckpointConfig

SCRIPT = Path(__file__).with_name("tier_ranks.py")
SCENARIOS = ["nothing", "lose_one", "lose_two", "damage", "lose_a_shard", "lose_too_much", "damage_all"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """What the ranks found after each scenario, in rank order."""
    run = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("tier")), *SCENARIOS],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[3])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-6000:]
    lines: dict[str, list[dict]] = {name: [] for name in SCENARIOS}
    for line in map(json.loads, run.stdout.splitlines()):
        lines[line["scenario"]].append(line)
    return {name: sorted(ranks, key=lambda line: line["rank"]) for name, ranks in lines.items()}


@pytest.mark.parametrize(
    ("scenario", "step", "local"),
    [
        ("nothing", 3, True),
        ("lose_one", 3, True),
        ("lose_two", 1, False),
        ("damage", 3, True),
        ("lose_a_shard", 2, True),
    ],
)
def test_the_newest_step_that_the_survivors_have_is_loaded(found, scenario: str, step: int, local: bool) -> None:
    assert len(found[scenario]) == 3
    for line in found[scenario]:
        assert (line["step"], line["local"], line["right"]) == (step, local, True)
        assert line["rank_states"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


@pytest.mark.parametrize(("scenario", "nodes"), [("lose_too_much", [0]), ("damage_all", [0, 1, 2])])
def test_if_no_step_is_complete_and_nothing_is_shared_every_rank_ends(found, scenario: str, nodes: list[int]) -> None:
    assert len(found[scenario]) == 3
    for line in found[scenario]:
        assert "no good checkpoint is left, and a run does not restart from step 0 by itself" in line["error"]
        assert [node for node in range(3) if f"/node-{node}/" in line["error"]] == nodes


def test_a_damaged_copy_is_named_and_the_copy_on_the_peer_is_used(found) -> None:
    ((kind, details), saved) = found["damage"][0]["events"]
    assert kind == "quarantined"
    assert "shard-00000.safetensors: model.w" in details["error"]
    assert saved[0] == "saved"


def test_the_newer_checkpoint_of_the_two_tiers_is_loaded(tmp_path: Path) -> None:
    config = CheckpointConfig(local_dir=str(tmp_path / "node"))
    manager = CheckpointManager(tmp_path / "shared", config, {}, lambda *_, **__: None)
    for step, local in ((1, True), (2, False), (3, True), (4, False)):
        manager.save(SavedProgress(step, step), {"model.w": torch.full((3,), float(step))}, {}, local=local)
        manager.wait()
        fresh = torch.zeros(3)
        loaded = manager.load_newest({"model.w": fresh})
        assert loaded is not None
        assert loaded.progress.step == step
        assert ("node" in loaded.path.split("/")) == local
        assert torch.equal(fresh, torch.full((3,), float(step)))
    manager.close()


def test_a_node_keeps_two_checkpoints_of_this_tier(tmp_path: Path) -> None:
    config = CheckpointConfig(local_dir=str(tmp_path / "node"))
    manager = CheckpointManager(tmp_path / "shared", config, {}, lambda *_, **__: None)
    for step in range(1, 6):
        manager.save(SavedProgress(step, step), {"model.w": torch.ones(3)}, {}, local=True)
    manager.close()
    assert sorted(path.name for path in tmp_path.glob("node/*/*")) == ["step-00000004", "step-00000005"]


def test_a_full_fast_tier_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, dict]] = []
    config = CheckpointConfig(local_dir=str(tmp_path / "node"), max_failures=2)
    manager = CheckpointManager(tmp_path / "shared", config, {}, lambda kind, **d: events.append((kind, d)))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert manager._tier is not None  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(manager._tier, "save", full)  # pyright: ignore[reportPrivateUsage]
    for step in range(1, 6):
        manager.save(SavedProgress(step, step), {"model.w": torch.ones(3)}, {}, local=step < 5)
        manager.wait()
    manager.close()
    assert [(kind, details["tier"]) for kind, details in events] == [("save_failed", "local")] * 4 + [
        ("saved", "shared")
    ]
    assert manager.saved_step == 5


def test_saves_to_the_fast_tier_do_not_hide_a_broken_shared_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, dict]] = []
    config = CheckpointConfig(local_dir=str(tmp_path / "node"), max_failures=2, background=False)
    manager = CheckpointManager(tmp_path / "shared", config, {}, lambda kind, **d: events.append((kind, d)))

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("train.checkpoint.save.Saver.write_shared", broken)
    state = {"model.w": torch.ones(3)}
    for step in (1, 2, 3):
        manager.save(SavedProgress(step, step), state, {}, local=step != 2)
    with pytest.raises(SavingFailedError, match=r"max_failures \(2\) saves in a row failed, the last at step 4"):
        manager.save(SavedProgress(4, 4), state, {})
    manager.close()
    assert [(kind, details["tier"], details.get("in_a_row")) for kind, details in events] == [
        ("saved", "local", None),
        ("save_failed", "shared", 1),
        ("saved", "local", None),
        ("save_failed", "shared", 2),
    ]


def test_a_copy_of_a_run_in_another_place_has_another_fast_tier(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    original, by_its_path = run_name("runs/a/checkpoints"), run_name(str(tmp_path / "here/runs/a/checkpoints"))
    monkeypatch.chdir(tmp_path / "there")
    assert original == by_its_path != run_name("runs/a/checkpoints")
