"""Whether a disk that was full is full still."""

from launch.diagnose.evidence import Evidence

LEAST_BYTES = 1 << 30
"""Free space that is enough if no checkpoint shows how much one needs."""


def is_full_now(evidence: Evidence) -> bool:
    """Return whether the disk of the run has no room for a checkpoint, or cannot be asked."""
    needed = evidence.needed_bytes or LEAST_BYTES
    return evidence.free_bytes is None or evidence.free_bytes < needed
