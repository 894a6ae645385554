"""Whether the kernel has killed processes of this machine because memory ran out."""

from pathlib import Path

VMSTAT = Path("/proc/vmstat")


def processes_killed_for_memory() -> int:
    """Return how many processes the kernel has killed for memory since its start, also within a job's own limit.

    0 if the kernel does not say."""
    try:
        lines = VMSTAT.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
