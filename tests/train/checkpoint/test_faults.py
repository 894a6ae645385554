"""Whatever fails during a save or a load, a complete checkpoint is left."""

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from train.checkpoint.format.verify import find_faults
from train.checkpoint.manager import CheckpointManager, SavedProgress
from train.checkpoint.stores import local as folder_module
from train.checkpoint.stores.local import LocalFolder, LocalRoot
from train.config import CheckpointConfig
from train.errors import CheckpointError

HERE = Path(__file__).parent


def script(name: str, *arguments: object, inside: Sequence[str] = ()) -> list[dict]:
    """Run a script of this folder; returns the lines of JSON that it prints. `inside` is a command that runs it."""
    run = subprocess.run(
        [*inside, sys.executable, str(HERE / name), *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[2])},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert run.returncode == 0, run.stderr[-6000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


class Run:
    """One process with a manager over a folder of checkpoints."""

    def __init__(self, folder: Path, background: bool = True) -> None:
        self.folder = folder
        self.events: list[tuple[str, dict]] = []
        config = CheckpointConfig(background=background, max_failures=9)
        self.manager = CheckpointManager(folder, config, {}, lambda kind, **d: self.events.append((kind, d)))

    def state(self, step: int) -> dict[str, torch.Tensor]:
        return {f"model.{i}": torch.full((300, 40), float(10 * step + i)) for i in range(3)}

    def save(self, step: int) -> str:
        self.manager.save(SavedProgress(step, step), self.state(step), {})
        self.manager.wait()
        return self.events[-1][0]

    def load(self) -> int:
        fresh = self.state(0)
        loaded = self.manager.load_newest(fresh)
        assert loaded is not None
        expected = self.state(loaded.progress.step)
        assert all(torch.equal(fresh[name], expected[name]) for name in fresh)
        return loaded.progress.step

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def run(tmp_path: Path):
    run = Run(tmp_path)
    assert run.save(1) == "saved"
    yield run
    run.manager.close()


ALL_CALLS = {"mkdir", "open", "write", "fsync", "rename", "close", "unlink", "rmdir"}


def kill_saver_at_every_call(folder: Path, step: int, ranks: int, victim: int, calls: set[str]) -> None:
    trials = script("kill_saves.py", folder, step, ranks, victim)
    killed = [trial for trial in trials if trial["killed"]]
    assert {trial["calls"][-1] for trial in killed if trial["after"]} >= calls
    assert len(killed) > 5 * len(calls)
    for trial in trials:
        assert trial["right"], trial
        assert trial["step"] in (1, step), trial
        assert trial["rank_states"] in ([{"step": 1}], [{"step": step}] * ranks), trial
        assert trial["left"] == ["step-00000003"], trial


@pytest.mark.parametrize("step", [2, 1], ids=["new", "again"])
def test_a_saver_killed_at_any_call_leaves_a_complete_checkpoint(tmp_path: Path, step: int) -> None:
    kill_saver_at_every_call(tmp_path, step, 1, 0, ALL_CALLS)


@pytest.mark.slow
def test_killing_rank_0_of_two_at_any_call_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    kill_saver_at_every_call(tmp_path, 2, 2, 0, ALL_CALLS)


@pytest.mark.slow
def test_killing_rank_1_of_two_at_any_call_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    kill_saver_at_every_call(tmp_path, 2, 2, 1, {"open", "write", "fsync"})


@pytest.mark.parametrize("fault", ["flip", "cut", "grown"])
def test_every_changed_byte_of_every_file_is_found(run: Run, tmp_path: Path, fault: str) -> None:
    good = tmp_path / "step-00000001"
    generator = random.Random(fault)
    for trial in range(60):
        bad = tmp_path / f"copy-{trial}"
        shutil.copytree(good, bad)
        path = generator.choice(sorted(bad.iterdir()))
        data = bytearray(path.read_bytes())
        at = generator.randrange(len(data))
        if fault == "flip":
            data[at] ^= 1 << generator.randrange(8)
        elif fault == "cut":
            del data[at:]
        else:
            data.insert(at, generator.randrange(256))
        path.write_bytes(data)
        assert [text for text in find_faults(LocalFolder(bad)) if path.name in text], (path, at)
    assert find_faults(LocalFolder(good)) == []


def test_random_damage_never_loads(run: Run, tmp_path: Path) -> None:
    generator = random.Random(3)
    for step in range(2, 22):
        run.save(step)
        path = generator.choice(sorted((tmp_path / f"step-{step:08d}").iterdir()))
        data = bytearray(path.read_bytes())
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        path.write_bytes(data)
        assert run.load() == step - 1
        kind, details = run.events[-1]
        assert kind == "quarantined"
        assert path.name in details["error"]
        assert run.save(step) == "saved"


def failing(error: int, at: int) -> Callable:
    """os.write, but it fails from call number `at` on."""
    write, calls = os.write, 0

    def fail(descriptor: int, data: bytes) -> int:
        nonlocal calls
        calls += 1
        if calls >= at:
            raise OSError(error, os.strerror(error))
        return write(descriptor, data)

    return fail


@pytest.mark.parametrize("at", [1, 2, 4, 5])  # the header, the first and the last tensor, the manifest
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_failed_write_fails_the_save_and_keeps_the_old_checkpoint(run: Run, monkeypatch, error: int, at: int) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(folder_module.os, "write", failing(error, at))
        assert run.save(2) == "save_failed"
    assert os.strerror(error) in run.events[-1][1]["error"]
    assert run.names() == ["step-00000001"]
    assert run.load() == 1
    assert run.save(3) == "saved"


def test_a_file_size_limit_is_handled_like_a_full_disk(run: Run) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        assert run.save(2) == "save_failed"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert "File too large" in run.events[-1][1]["error"]
    assert run.names() == ["step-00000001"]


def read_only(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_read_only_folder_fails_saves_and_still_loads(run: Run, tmp_path: Path, monkeypatch) -> None:
    run.save(2)
    (tmp_path / "step-00000002" / "shard-00000.safetensors").unlink()
    with monkeypatch.context() as patch:
        for name in ("mkdir", "rename"):
            patch.setattr(Path, name, read_only)
        assert run.save(3) == "save_failed"
        assert "Read-only file system" in run.events[-1][1]["error"]
        assert run.load() == 1  # the damaged checkpoint cannot be renamed, so it is skipped


def test_steps_continue_while_a_slow_disk_writes_and_the_next_save_waits(run: Run, monkeypatch) -> None:
    write, disk = os.write, threading.Event()

    def slowly(descriptor: int, data: bytes) -> int:
        assert disk.wait(600)
        return write(descriptor, data)

    monkeypatch.setattr(folder_module.os, "write", slowly)
    run.manager.save(SavedProgress(2, 2), run.state(2), {})
    run.manager.poll()
    assert [kind for kind, _ in run.events] == ["saved"]  # step 2 is still being written
    threading.Timer(0.3, disk.set).start()
    run.manager.save(SavedProgress(3, 3), run.state(3), {})
    assert [details["step"] for _, details in run.events] == [1, 2]
    run.manager.wait()
    assert run.load() == 3
    assert run.manager.staging_bytes == 3 * 300 * 40 * 4  # one copy, reused


def test_partial_folders_of_dead_savers_are_removed_and_those_of_live_ones_stay(run: Run, tmp_path: Path) -> None:
    (tmp_path / ".step-00000009.partial-dead").mkdir()
    living = LocalRoot(tmp_path)
    attempt = living.begin(9)
    assert run.save(2) == "saved"
    assert run.names() == [attempt, "step-00000001", "step-00000002"]
    living.abandon(attempt)
    assert run.names() == ["step-00000001", "step-00000002"]


def test_retention_ignores_folders_that_someone_else_has_removed(run: Run, tmp_path: Path, monkeypatch) -> None:
    remove = LocalRoot.remove

    def removed_before(self: LocalRoot, step: int) -> None:
        shutil.rmtree(tmp_path / f"step-{step:08d}")
        remove(self, step)

    monkeypatch.setattr(LocalRoot, "remove", removed_before)
    assert [run.save(step) for step in range(2, 6)] == ["saved"] * 4
    assert run.names() == ["step-00000003", "step-00000004", "step-00000005"]


def test_an_empty_state_is_refused(run: Run) -> None:
    with pytest.raises(CheckpointError, match="no state to save"):
        run.manager.save(SavedProgress(2, 2), {}, {})


def test_a_full_disk_of_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    first, second = sorted(script("fault_ranks.py", tmp_path / "run", "full_disk"), key=lambda line: line["rank"])
    assert [event["kind"] for event in first["events"]] == ["saved", "save_failed", "saved"]
    assert first["events"][1]["error"] == "rank 1: OSError: [Errno 28] No space left on device"
    assert first["left"] == ["step-00000001"]
    for line in (first, second):
        assert line["loaded"] == {"step": 3, "right": True, "rank_states": [{"rank": 0}, {"rank": 1}]}


def may_mount() -> bool:
    """Whether this process may mount a file system in a namespace of its own; root in a container often may not."""
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    return shutil.which("unshare") is not None and subprocess.run(probe, capture_output=True).returncode == 0


@pytest.mark.skipif(not may_mount(), reason="a file system cannot be mounted here; that needs root and the right to")
def test_a_file_system_without_a_free_block_fails_the_save_on_all_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    mounted = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=256k tmpfs "$0" && exec "$@"', str(folder)]
    first, second = sorted(
        script("fault_ranks.py", folder, "small_disk", inside=mounted), key=lambda line: line["rank"]
    )
    assert [event["kind"] for event in first["events"]] == ["saved", "save_failed", "saved"]
    assert "No space left on device" in first["events"][1]["error"]
    assert first["left"] == ["filler", "step-00000001"]
    for line in (first, second):
        assert line["loaded"] == {"step": 3, "right": True, "rank_states": [{"rank": 0}, {"rank": 1}]}


@pytest.mark.parametrize("scenario", ["killed", "frozen"])
def test_a_rank_lost_in_a_save_fails_it_immediately_or_after_the_timeout(tmp_path: Path, scenario: str) -> None:
    (line,) = script("fault_ranks.py", tmp_path / "run", scenario)
    assert [event["kind"] for event in line["events"]] == ["saved", "save_failed"]
    assert line["left"] == ["step-00000001"]


def test_after_a_missing_shard_all_ranks_load_the_checkpoint_before(tmp_path: Path) -> None:
    for line in script("fault_ranks.py", tmp_path / "run", "missing_shard"):
        assert line["loaded"] == {"step": 1, "right": True, "rank_states": [{"rank": 0}, {"rank": 1}]}
        assert line["left"] == ["damaged-step", "step"]


def test_a_checkpoint_that_does_not_fit_one_rank_is_refused_by_all(tmp_path: Path) -> None:
    lines = script("fault_ranks.py", tmp_path / "run", "another_run")
    assert len(lines) == 2
    for line in lines:
        assert line["error"].startswith("rank 1: 1 tensors have another shape or type (model.3: F32 (64, 4) saved")


def test_two_savers_in_one_folder_leave_only_complete_checkpoints(tmp_path: Path) -> None:
    lines = script("fault_ranks.py", tmp_path / "run", "two_savers")
    assert len(lines) == 2
    for line in lines:
        assert line["loaded"]["right"]
        assert line["loaded"]["step"] == 8
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["step-00000006", "step-00000007", "step-00000008"]
    assert all(find_faults(LocalFolder(tmp_path / "run" / name)) == [] for name in names)
