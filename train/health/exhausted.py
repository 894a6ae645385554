"""Says in one line that disk or memory ran out, and what to lower. Imports no torch."""

import errno
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from train.errors import ExhaustedError

FULL = (errno.ENOSPC, errno.EDQUOT)
UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
OUT_OF_MEMORY = ("DefaultCPUAllocator", "out of memory", "Cannot allocate memory", "std::bad_alloc")
"""Parts of the messages of torch's errors when memory runs out."""


@contextmanager
def exhaustion_in_one_line(folder: Path) -> Generator[None]:
    """Raise ExhaustedError in place of an error that says that disk or memory ran out. `folder`: the run's folder."""
    try:
        yield
    except (OSError, MemoryError, RuntimeError) as error:
        if (line := describe_exhaustion(error, folder)) is None:
            raise
        raise ExhaustedError(line) from error


def describe_exhaustion(error: BaseException, folder: Path) -> str | None:
    """Return what ran out and what to do, as one line; None for an error of another kind."""
    if isinstance(error, OSError) and error.errno in FULL:
        return (
            f"no space is left for {error.filename or folder} ({error.strerror}); free some space, keep fewer "
            "checkpoints (checkpoint.keep_last), or set runs_dir to another disk; then the same command resumes"
        )
    if isinstance(error, OSError) and error.errno in UNWRITABLE and str(error.filename).startswith(str(folder)):
        return (
            f"{error.filename} cannot be written ({error.strerror}); make {folder} writable, or set runs_dir to "
            "another folder"
        )
    is_memory = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if is_memory or (isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)):
        said = " ".join(str(error).split())[:300]
        return (
            f"memory ran out{f' ({said})' if said else ''}; lower train.micro_batch_size or model.seq_len, set "
            "parallel.activation_checkpointing to selective or full, or use more ranks with parallel.engine fsdp2"
        )
    return None
