"""Python's garbage collector, on a schedule of ours: at random moments it would stall one rank, and all wait for one.

What lives at the start lives to the end, so it is frozen: later collections pass over it. Tensors are freed by their
reference counts all the same; only cycles wait for `collect`.
"""

import gc

EVERY = 200
"""Steps between collections."""


def pause() -> None:
    """First of all in a process: imports leave next to no garbage, and looking for it takes a tenth of their time."""
    gc.disable()


def keep_imports() -> None:
    """When all is imported: `freeze` need not look through it."""
    gc.freeze()


def freeze() -> None:
    """Once, when the run is set up and before its first step."""
    gc.collect()
    gc.freeze()
    gc.disable()


def thaw() -> None:
    """When the run is over, for a process that lives on."""
    gc.unfreeze()
    gc.enable()


def collect(step: int) -> None:
    """After each step. All ranks collect after the same one."""
    if step % EVERY == 0:
        gc.collect()
