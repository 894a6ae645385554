"""Reads a log in blocks of whole lines, from either end, so that a long file needs little memory and few calls.

The limits of `train.records.jsonl` hold: a file without an end of line in UNBROKEN_BYTES is read no further, and of a
longer line than LINE_BYTES so much is kept that it is still too long."""

import contextlib
import gc
import io
from collections.abc import Generator, Iterator
from typing import BinaryIO

from train.records.jsonl import LINE_BYTES, UNBROKEN_BYTES

BLOCK_BYTES = 4 << 20
"""Bytes that are read at a time."""


def blocks(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file in order. Each block ends with an end of line, except perhaps the last one."""
    rest, unbroken = b"", 0
    while data := file.read(BLOCK_BYTES):
        whole, newline, tail = data.rpartition(b"\n")
        if newline:
            yield rest + whole + newline
            rest, unbroken = tail, len(tail)
            continue
        rest, unbroken = (rest + tail)[: LINE_BYTES + 1], unbroken + len(tail)
        if unbroken >= UNBROKEN_BYTES:
            return
    if rest:
        yield rest


def blocks_backwards(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file, the last block first. Each block ends with an end of line, except perhaps the first
    one that comes."""
    end, rest, unbroken = file.seek(0, io.SEEK_END), b"", 0
    while end and unbroken < UNBROKEN_BYTES:
        start = max(0, end - BLOCK_BYTES)
        file.seek(start)
        data = file.read(end - start)
        end = start
        head, newline, tail = data.partition(b"\n")
        if start and newline:
            if tail or rest:
                yield tail + rest
            rest, unbroken = head + newline, len(head)
        elif start:
            rest, unbroken = (data + rest)[-LINE_BYTES - 1 :], unbroken + len(data)
        else:
            yield data + rest


@contextlib.contextmanager
def without_collections() -> Generator[None]:
    """Keep Python from looking for garbage among millions of short-lived values, which takes a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
