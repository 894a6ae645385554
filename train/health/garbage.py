"""Python's garbage collector on a schedule that is the same on all ranks.

A collection at a random moment stalls one rank, and all others wait for it. So automatic collection is off, and
`collect` runs it after the same steps on every rank. Objects that exist when the run starts live until its end. They
are frozen, so later collections do not scan them. Tensors are still freed by their reference counts; only reference
cycles wait for `collect`.
"""

import gc

STEPS_BETWEEN = 200
"""Optimizer steps between two collections."""


def pause() -> None:
    """Turn off automatic collection. Call it first in a process: imports leave almost no garbage, and a tenth of their
    time would go into the search for it."""
    gc.disable()


def freeze_imports() -> None:
    """Exempt everything imported so far from collection, so that `freeze` does not scan it."""
    gc.freeze()


def freeze() -> None:
    """Collect once and exempt all that is left. Call it when the run is set up, before its first step."""
    gc.collect()
    gc.freeze()
    gc.disable()


def unfreeze() -> None:
    """Restore automatic collection of all objects, for a process that continues after the run."""
    gc.unfreeze()
    gc.enable()


def collect(step: int) -> None:
    """Collect if this step is due. Call it after each step; all ranks then collect after the same steps."""
    if step % STEPS_BETWEEN == 0:
        gc.collect()
