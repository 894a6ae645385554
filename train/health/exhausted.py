"""Says in one line that disk or memory ran out, and what to lower. Imports no torch.

`keepstep run` hands its plan to the ranks. When memory runs out, it stands beside what was measured."""

import errno
import json
import os
import resource
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from data_pipeline.untrusted import in_one_line
from train.errors import ConfigError, DeviceMemoryError, ExhaustedError

FULL = (errno.ENOSPC, errno.EDQUOT)
UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
NO_PLACE = (errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)
OUT_OF_MEMORY = ("DefaultCPUAllocator", "out of memory", "Cannot allocate memory", "std::bad_alloc")
"""Parts of the messages of torch's errors when memory runs out."""
PLAN_VARIABLE = "KEEPSTEP_PLAN"
"""Environment variable with the plan as JSON: bytes of `parts`, and `changes` that save most."""


@contextmanager
def exhaustion_in_one_line(folder: Path) -> Generator[None]:
    """Raise ExhaustedError in place of an error that says that disk or memory ran out. `folder`: the run's folder.

    DeviceMemoryError if it was a device's memory: `train.health.device_memory` knows more once the run is built."""
    try:
        yield
    except (OSError, MemoryError, RuntimeError) as error:
        if (line := describe_exhaustion(error, folder)) is None:
            raise
        raise (DeviceMemoryError if _is_device_memory(error) else ExhaustedError)(line) from error


def make_folder(folder: Path) -> None:
    """Create a run's folder, or one inside of it, with its parents. ExhaustedError or ConfigError if that fails."""
    with exhaustion_in_one_line(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno not in NO_PLACE:
                raise
            raise ConfigError(
                f"the folder {folder} cannot be made ({error.strerror}: {error.filename}); set runs_dir or name to "
                "another one"
            ) from None


def _is_on_the_way(file: str | None, folder: Path) -> bool:
    """Return whether a path is that of the folder, of a part of it, or of one of its parents."""
    path = Path(file or "")
    return file is not None and (path.is_relative_to(folder) or folder.is_relative_to(path))


def describe_exhaustion(error: BaseException, folder: Path) -> str | None:
    """Return what ran out and what to do, as one line; None for an error of another kind."""
    if isinstance(error, OSError) and error.errno in FULL:
        return (
            f"no space is left for {error.filename or folder} ({error.strerror}); free some space, keep fewer "
            "checkpoints (checkpoint.keep_last), or set runs_dir to another disk; then the same command resumes"
        )
    if isinstance(error, OSError) and error.errno in UNWRITABLE and _is_on_the_way(error.filename, folder):
        return (
            f"{error.filename} cannot be written ({error.strerror}); make {folder} writable, or set runs_dir to "
            "another folder"
        )
    is_memory = (
        isinstance(error, MemoryError)
        or _is_device_memory(error)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    )
    if is_memory or (isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)):
        return memory_ran_out(error)
    return None


def memory_ran_out(error: BaseException, breakdown: str = "") -> str:
    """Return that memory ran out and what to lower, as one line. `breakdown`: what the memory holds.

    If the run has a plan, it names the changes that save most, and the plan's total if there is no breakdown."""
    plan = planned()
    said = in_one_line(error)
    if not breakdown and plan.parts:
        breakdown = f"this rank held up to {peak_host_bytes() / 2**30:.2f} GiB, the plan is {plan.total / 2**30:.2f}"
    told = "; ".join(part for part in (said, breakdown) if part)
    advice = (
        "lower train.micro_batch_size or model.seq_len, set parallel.activation_checkpointing to selective or full, or "
        "use more ranks with parallel.engine fsdp2"
    )
    if plan.changes:
        advice = f"set {' or '.join(plan.changes)}, or {advice.partition(', ')[0]}"
    return f"memory ran out{f' ({told})' if told else ''}; {advice}"


def peak_host_bytes() -> int:
    """Return the most memory that this process has held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _is_device_memory(error: BaseException) -> bool:
    """Return whether the memory of a device ran out: torch's OutOfMemoryError, which exists only with torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


@dataclass(frozen=True)
class Planned:
    """What the plan says about the memory of a rank."""

    parts: dict[str, float] = field(default_factory=dict[str, float])
    """Planned bytes, by the names of `train.health.device_memory.describe`."""
    changes: tuple[str, ...] = ()
    """Changes of one setting that save most memory, the largest first."""

    def beside(self, name: str) -> str:
        """Return the planned GiB of a part, to stand behind the measured ones; "" if no plan is known."""
        return f" (plan {self.parts[name] / 2**30:.2f})" if name in self.parts else ""

    @property
    def total(self) -> float:
        """Planned bytes of the rank."""
        return sum(self.parts.values())


def planned() -> Planned:
    """Return the plan of this run; an empty one if another launcher started the rank."""
    text = os.environ.get(PLAN_VARIABLE)
    if text is None:
        return Planned()
    document = json.loads(text)
    return Planned(document["parts"], tuple(document["changes"]))
