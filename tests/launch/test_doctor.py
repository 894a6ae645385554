"""What the doctor makes of versions, limits, file systems and Slurm's settings."""

import json

import pytest

from launch import cli
from launch.doctor import (
    device_finding,
    file_system_findings,
    judge_slurm,
    limit_findings,
    name_finding,
    version_findings,
)

GOOD = {"torch": "2.13.0+cu128", "deepspeed": "0.19.8", "mpi4py": "4.1.2"}


def problems(findings) -> list[str]:
    return [finding.what for finding in findings if finding.level == "problem"]


def test_this_machine_can_train(tmp_path, capsys):
    code = cli.main(["doctor", "--json", "--dir", str(tmp_path)])
    report = json.loads(capsys.readouterr().out)
    assert (code == 0) is not any(finding["level"] == "problem" for finding in report["findings"])
    assert any("rename and fsync work" in finding["what"] for finding in report["findings"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"torch": "2.9.1"}, ["torch 2.9.1"]),
        ({"torch": ""}, ["torch is not installed"]),
        ({"deepspeed": "0.18.0"}, ["deepspeed 0.18.0"]),
    ],
)
def test_versions_that_fail_are_named(changed, expected):
    assert problems(version_findings(GOOD | changed, "3.11.7")) == expected


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


@pytest.mark.parametrize(("address", "level"), [("127.0.1.1", "note"), (None, "note"), ("10.0.0.1", "ok")])
def test_a_name_that_means_loopback_is_noted(address, level):
    assert name_finding("node", lambda _: address).level == level


def test_slurm_settings_that_hurt_are_told_with_a_way_out():
    config = {
        "SLURM_VERSION": "22.05.8",
        "ClusterName": "lab",
        "JobRequeue": "0",
        "KillWait": "5 sec",
        "PreemptMode": "REQUEUE",
        "SlurmctldParameters": "(null)",
        "ProctrackType": "proctrack/linuxproc",
    }
    findings = list(judge_slurm(config))
    assert problems(findings) == ["KillWait is 5 s"]
    whats = " | ".join(finding.what for finding in findings)
    for part in (
        "JobRequeue is 0",
        "preemption comes without the warning signal",
        "ProctrackType is proctrack/linuxproc",
    ):
        assert part in whats
    assert all(finding.why and finding.do for finding in findings[1:])


def test_a_good_slurm_has_nothing_to_tell():
    good = {"KillWait": "60 sec", "PreemptMode": "OFF", "ProctrackType": "proctrack/cgroup", "JobRequeue": "1"}
    assert [finding.level for finding in judge_slurm(good)] == ["ok"]
