"""How long work reports its progress: the caller passes a `Progress`, for example one that draws bars."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[float], None]
"""Reports that so many more units are done."""


class Progress(Protocol):
    """Opens the display of one stage of the work."""

    def __call__(self, description: str, total: float | None, unit: str) -> AbstractContextManager[Advance]:
        """A context that yields an `Advance`. `total` None: unknown. `unit` is "bytes" or a plural noun."""
        ...


@contextmanager
def silent(description: str, total: float | None, unit: str) -> Generator[Advance]:
    """A `Progress` that shows nothing."""
    yield lambda amount: None
