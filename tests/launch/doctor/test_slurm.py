"""Findings about Slurm's settings."""

from launch.doctor.slurm import judge_slurm


def test_harmful_slurm_settings_are_reported_with_a_remedy():
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
    assert [finding.what for finding in findings if finding.level == "problem"] == ["KillWait is 5 s"]
    whats = " | ".join(finding.what for finding in findings)
    for part in (
        "JobRequeue is 0",
        "preemption sends no warning signal",
        "ProctrackType is proctrack/linuxproc",
    ):
        assert part in whats
    assert all(finding.why and finding.do for finding in findings[1:])


def test_good_slurm_settings_have_no_findings():
    good = {"KillWait": "60 sec", "PreemptMode": "OFF", "ProctrackType": "proctrack/cgroup", "JobRequeue": "1"}
    assert [finding.level for finding in judge_slurm(good)] == ["ok"]
