"""Functions with the faults that the fuzzer must find: each shows its fault once its file is not the valid one."""

import time
from collections.abc import Callable
from pathlib import Path

from tests.hostile.fuzz.format import Codec, Consumer, Format

VALID = b"valid"
_KEPT: list[bytes] = []


def _build(folder: Path) -> None:
    (folder / "file").write_bytes(VALID)


def _faulty(name: str, fault: Callable[[Path, Path], str]) -> Format:
    def call(folder: Path, out: Path) -> str:
        path = folder / "file"
        return fault(folder, out) if not path.is_file() or path.read_bytes() != VALID else "right"

    codec = Codec(bytes, lambda files, file, data: {file: data})
    return Format(name, _build, [("file", codec)], [Consumer(name, call)], "nothing")


def crash(folder: Path, out: Path) -> str:
    """Raises an error that is no answer to a user."""
    raise KeyError("file")


def spin(folder: Path, out: Path) -> str:
    """Uses CPU time without end."""
    while True:
        pass


def wait(folder: Path, out: Path) -> str:
    """Waits without end."""
    while True:
        time.sleep(60)


def swell(folder: Path, out: Path) -> str:
    """Takes 600 MB and gives the right answer."""
    _KEPT.append(b"x" * (600 << 20))
    return "right"


def leave(folder: Path, out: Path) -> str:
    """Writes into another folder."""
    (folder.parent / "canary" / "new").write_bytes(b"")
    return "right"


def publish(folder: Path, out: Path) -> str:
    """Writes a secret to the output."""
    (out / "file").write_bytes((folder.parent / "canary" / "secret").read_bytes())
    return "right"


def other(folder: Path, out: Path) -> str:
    """Gives another answer."""
    return "wrong"


FAULTY = {fault.__name__: _faulty(fault.__name__, fault) for fault in (crash, spin, wait, swell, leave, publish, other)}
