"""How a training process ends, and what every launcher does about it."""

FINISHED = 0
"""The last step is done and saved. Nothing to do."""

FAILED = 1
"""Something broke that another try may not meet again (a dead node, a full disk). torchrun and Slurm try again."""

FAILED_FOR_GOOD = 2
"""Bad recipe, bad data, a diverged run: the same command would fail again. Nobody tries again."""

STOPPED = 75
"""Stopped on request, with a complete checkpoint or before the first step. Start the same command again to go on
(EX_TEMPFAIL of sysexits.h)."""
