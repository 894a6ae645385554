"""The box of one input: the mutated folder `in`, and around it what no consumer may touch.

box/in       the folder that consumers read, one file of which was mutated
box/out      where consumers may write
box/tmp      the folder for temporary files
box/home     the home folder
box/canary   files that no consumer may write, and a secret that none may publish
"""

import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SECRET_TEXT = b"the secret outside of the folder 4d1f0c"
WRITABLE = ("in", "out", "tmp")


@dataclass(frozen=True)
class Special:
    """Something in place of a plain file."""

    kind: str
    """`missing`, `fifo`, `socket`, `folder`, `loop`, `huge`, `secret` or `zeros`."""


SPECIALS = [Special(kind) for kind in ("missing", "fifo", "socket", "folder", "loop", "huge", "secret", "zeros")]
HUGE_BYTES = 1 << 40
"""Size of a file without content: a terabyte of zeros that takes no space."""


def make_box(box: Path) -> None:
    """Make an empty box, except for `in`."""
    for name in ("out", "tmp", "home", "canary"):
        (box / name).mkdir(parents=True)
    (box / "canary" / "secret").write_bytes(SECRET_TEXT)
    (box / "home" / ".bashrc").write_text("# untouched\n")


def fill(box: Path, pristine: Path, changes: Mapping[str, bytes | Special]) -> None:
    """Copy the pristine folder to `in`, with these files changed, and empty `out` and `tmp`."""
    for name in WRITABLE:
        shutil.rmtree(box / name, ignore_errors=True)
    (box / "out").mkdir()
    (box / "tmp").mkdir()
    shutil.copytree(pristine, box / "in", symlinks=True)
    for name, content in changes.items():
        path = box / "in" / name
        if isinstance(content, Special):
            _place(path, content, box)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def _place(path: Path, special: Special, box: Path) -> None:
    path.unlink(missing_ok=True)
    match special.kind:
        case "missing":
            pass
        case "fifo":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as made:
                here = Path.cwd()
                os.chdir(path.parent)  # the path of a socket may have 107 bytes
                try:
                    made.bind(path.name)
                finally:
                    os.chdir(here)
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path.name)
        case "huge":
            path.touch()
            os.truncate(path, HUGE_BYTES)
        case "secret":
            path.symlink_to(box / "canary" / "secret")
        case _:
            path.symlink_to("/dev/zero")


def snapshot(box: Path) -> dict[str, tuple[int, bytes]]:
    """Mode and content of everything in the box that no consumer may touch."""
    found: dict[str, tuple[int, bytes]] = {}
    for top in sorted(box.iterdir()):
        if top.name not in WRITABLE:
            for path in (top, *sorted(top.rglob("*"))):
                mode = path.lstat().st_mode
                found[str(path.relative_to(box))] = mode, path.read_bytes() if path.is_file() else b""
    return found


def leaked(box: Path) -> str | None:
    """A written file with the secret, or None."""
    for path in sorted((box / "out").rglob("*")):
        if path.is_file() and not path.is_symlink() and SECRET_TEXT in path.read_bytes():
            return str(path.relative_to(box))
    return None
