"""Exit codes of a training process, and how every launcher reacts to them."""

FINISHED = 0
"""The last step is done and saved. Launchers do nothing."""

FAILED = 1
"""A failure that another attempt may not have, such as a dead node or a full disk. torchrun and Slurm try again."""

FAILED_FOR_GOOD = 2
"""A bad recipe, bad data or a diverged run: the same command would fail again. Nothing tries again."""

OUT_OF_MEMORY = 3
"""The memory of a device ran out before the attempt finished a step: the same command would fail again. Nothing tries
again. (Later in an attempt it is FAILED, because a new process begins with memory in one piece.)"""

NEVER_AGAIN = (FAILED_FOR_GOOD, OUT_OF_MEMORY)
"""Codes after which nothing tries again."""

STOPPED = 75
"""Stopped on request, with a complete checkpoint or before the first step. The same command resumes the run. (The value
is EX_TEMPFAIL of sysexits.h.)"""
