"""What the doctor makes of this machine: limits, devices, file systems; and its figures."""

import json
from pathlib import Path

import pytest

from launch import cli
from launch.commands.doctor import device_finding, file_system_findings, limit_findings, speed_finding


def problems(findings) -> list[str]:
    return [finding.what for finding in findings if finding.level == "problem"]


def test_this_machine_can_train(tmp_path, capsys):
    code = cli.main(["doctor", "--json", "--dir", str(tmp_path)])
    *findings, figures = map(json.loads, capsys.readouterr().out.splitlines())
    assert (code == 0) is not any(finding["level"] == "problem" for finding in findings)
    assert any("rename and fsync work" in finding["what"] for finding in findings)
    assert figures["figures"] == {}
    assert list(tmp_path.iterdir()) == []


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
def test_a_slow_or_full_disk_is_noted(free_bytes, bytes_per_second, level):
    finding = speed_finding(Path("/runs"), free_bytes, bytes_per_second)
    assert finding.level == level
    assert f"written at {bytes_per_second / 1e6:.0f} MB/s" in finding.what


def test_figures_are_measured_and_printed_for_programs(tmp_path, capsys):
    cli.main(["doctor", "--json", "--measure", "--dir", str(tmp_path)])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert set(figures) == {
        "devices",
        "matmul_bf16_flops_per_second",
        "copy_bytes_per_second",
        "memory_bytes",
        "disk_write_bytes_per_second",
    }
    assert all(value > 0 for name, value in figures.items() if name != "devices")
