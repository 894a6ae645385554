"""Slurm's settings that decide whether a run survives, for `keepstep doctor --cluster`."""

import subprocess
from collections.abc import Iterator, Mapping

from launch.doctor.finding import Finding
from launch.doctor.versions import numbers


def slurm_findings() -> list[Finding]:
    """Return the findings about the settings that `scontrol show config` prints."""
    try:
        result = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return [Finding("problem", "scontrol does not answer", "no job can be submitted from here", "use a login node")]
    pairs = (line.partition("=") for line in result.stdout.splitlines())
    return list(judge_slurm({name.strip(): value.strip() for name, _, value in pairs}))


def judge_slurm(config: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings about these settings, given by name."""
    yield Finding("ok", f"Slurm {config.get('SLURM_VERSION', '?')}, cluster {config.get('ClusterName', '?')}")
    if config.get("JobRequeue") == "0":
        yield Finding(
            "note",
            "JobRequeue is 0",
            "a job is requeued only if it has --requeue",
            "nothing for slurm/train.sbatch, which has --requeue",
        )
    seconds = numbers(config.get("KillWait", "30"))[:1]
    if seconds and seconds[0] < 30:
        yield Finding(
            "problem",
            f"KillWait is {seconds[0]} s",
            "a cancelled or preempted job has only this long to save",
            "raise it, or save more often (checkpoint.every)",
        )
    preempts = config.get("PreemptMode", "OFF") not in ("OFF", "(null)")
    if preempts and "preempt_send_user_signal" not in config.get("SlurmctldParameters", ""):
        yield Finding(
            "note",
            "preemption sends no warning signal",
            "a preempted job gets TERM, and KILL after KillWait or the partition's grace time",
            "set SlurmctldParameters=preempt_send_user_signal, and a GraceTime in the partition",
        )
    if "linuxproc" in config.get("ProctrackType", "") or "pgid" in config.get("ProctrackType", ""):
        yield Finding(
            "note",
            f"ProctrackType is {config['ProctrackType']}",
            "processes that leave their process group outlive a job",
            "set proctrack/cgroup; keepstep kills its own leftover processes in any case",
        )
