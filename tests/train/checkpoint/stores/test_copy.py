"""A copy of a checkpoint in another folder."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from train.checkpoint.format.verify import find_faults
from train.checkpoint.manager import CheckpointManager, SavedProgress
from train.checkpoint.stores.copy import copy
from train.checkpoint.stores.local import LocalFolder, LocalRoot
from train.config import CheckpointConfig

KILLED = """
import os, signal, sys
from pathlib import Path
from train.checkpoint.stores import copy
from train.checkpoint.stores.local import LocalFolder, LocalRoot

def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

copy.encode = killed  # when all files are written, before the commit
copy.copy(LocalFolder(Path(sys.argv[1])), LocalRoot(Path(sys.argv[2])))
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> LocalFolder:
    manager = CheckpointManager(tmp_path / "run", CheckpointConfig(), {}, lambda *_, **__: None)
    manager.save(SavedProgress(3, 3), {"model.w": torch.ones(5)}, {})
    manager.close()
    return LocalFolder(tmp_path / "run" / "step-00000003")


def test_what_a_killed_copy_left_is_removed_by_the_next_one(checkpoint: LocalFolder, tmp_path: Path) -> None:
    target = tmp_path / "backup"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[4])}
    argv = [sys.executable, "-c", KILLED, str(checkpoint), str(target)]
    assert subprocess.run(argv, env=env, timeout=600).returncode == -signal.SIGKILL
    [partial] = target.iterdir()
    assert partial.name.startswith(".step-00000003.partial-")
    made = copy(checkpoint, LocalRoot(target))
    assert find_faults(made) == []
    assert [path.name for path in target.iterdir()] == ["step-00000003"]


def test_a_copy_that_is_being_written_is_not_removed(checkpoint: LocalFolder, tmp_path: Path) -> None:
    other = LocalRoot(tmp_path / "backup")
    attempt = other.begin(9)
    copy(checkpoint, LocalRoot(tmp_path / "backup"))
    assert (tmp_path / "backup" / attempt).is_dir()
    other.abandon(attempt)
