import os
from pathlib import Path

import pytest

from data_pipeline.atomic_file import write_atomic


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    write_atomic(tmp_path / "x", b"one")
    write_atomic(tmp_path / "x", b"two")
    assert (tmp_path / "x").read_bytes() == b"two"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    write_atomic(tmp_path / "x", b"one")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left"):
        write_atomic(tmp_path / "x", b"two")
    assert (tmp_path / "x").read_bytes() == b"one"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
