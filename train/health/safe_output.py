"""Standard output and error that cannot end a run.

A terminal that is closed answers every write with EIO, a `tee` that Ctrl-C ended with EPIPE, a full disk with ENOSPC.
Output is worth less than the checkpoint that the run is about to save, so such lines are dropped.
"""

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _SafeFile(io.FileIO):
    """A file on an open descriptor. Drops what the system refuses to write."""

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write the bytes and return their number, also if they were dropped."""
        size = memoryview(data).nbytes
        try:
            return super().write(data) or size
        except OSError:
            return size


def protect_output() -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams that never raise OSError. Streams set by others stay."""
    sys.stdout = _protected(sys.stdout, sys.__stdout__, 1)
    sys.stderr = _protected(sys.stderr, sys.__stderr__, 2)


def erase_view() -> None:
    """Erase what the live view has drawn below the cursor (`train.records.live_view`), before something is printed."""
    if sys.stderr.isatty():
        print("\r\x1b[J", end="", file=sys.stderr, flush=True)


def _protected(stream: TextIO | None, original: TextIO | None, descriptor: int) -> TextIO:
    if stream is None:  # the process was started with this descriptor closed
        return Path(os.devnull).open("w", encoding="utf-8")
    if stream is not original:
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    raw = _SafeFile(descriptor, "w", closefd=False)
    line_buffering = descriptor == 2 or stream.isatty()
    unbuffered = getattr(stream, "write_through", False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=line_buffering,
        write_through=unbuffered,
    )
