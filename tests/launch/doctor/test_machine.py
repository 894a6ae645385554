"""Findings about the limits, devices and file system of this machine."""

from pathlib import Path

import pytest

from launch.doctor.machine import device_finding, file_system_findings, limit_findings, speed_finding


def problems(findings) -> list[str]:
    return [finding.what for finding in findings if finding.level == "problem"]


def test_small_limits_are_problems():
    assert problems(limit_findings(1024, 64 << 20)) == ["only 1024 open files allowed", "/dev/shm has 0.06 GiB"]
    assert problems(limit_findings(65536, 16 << 30)) == []


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path):
    assert problems(file_system_findings(tmp_path / "absent")) == [
        f"cannot write in {tmp_path}/absent: No such file or directory"
    ]


def test_gpus_without_a_driver_are_a_problem():
    assert device_finding(8, "").level == "problem"
    assert device_finding(8, "570.1").level == "ok"


@pytest.mark.parametrize(
    ("free_bytes", "bytes_per_second", "level"), [(1 << 40, 1e9, "ok"), (1 << 40, 5e6, "note"), (1 << 30, 1e9, "note")]
)
def test_a_slow_or_full_disk_is_a_note(free_bytes, bytes_per_second, level):
    finding = speed_finding(Path("/runs"), free_bytes, bytes_per_second)
    assert finding.level == level
    assert f"written at {bytes_per_second / 1e6:.0f} MB/s" in finding.what
