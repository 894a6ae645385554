"""The kernel's count of processes that it killed for memory."""

from pathlib import Path

import pytest

from launch.supervise import kernel


@pytest.mark.parametrize(
    ("text", "count"),
    [("nr_free_pages 7\noom_kill 12\n", 12), ("nr_free_pages 7\n", 0), ("oom_kill \xff\n", 0), (None, 0)],
)
def test_the_count_is_read_where_the_kernel_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, count: int
) -> None:
    monkeypatch.setattr(kernel, "VMSTAT", tmp_path / "vmstat")
    if text is not None:
        (tmp_path / "vmstat").write_text(text)
    assert kernel.processes_killed_for_memory() == count
