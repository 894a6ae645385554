"""The folder of a run in a place where everyone may write, such as /dev/shm or /tmp.

Whoever can write there can make our folder before we do. So it is ours alone (mode 0700), and it is used only if it and
everything in it belong to this user.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from train.errors import CheckpointError


def make_private(path: Path) -> None:
    """Create a folder that only this user may enter, or check the one that exists.

    CheckpointError if anyone else could have written to it, or has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shared = path.parent.stat().st_mode
    if shared & stat.S_IWOTH and not shared & stat.S_ISVTX:
        raise CheckpointError(
            f"everyone may rename what is in {path.parent} (checkpoint.local_dir): it is writable for all and has no "
            "sticky bit; name a folder of your own, or set the bit with chmod +t"
        )
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        _check(path)
        if stat.S_IMODE(path.stat().st_mode) & 0o077:  # an earlier version made it; from now on, no one can add to it
            path.chmod(0o700)
        for entry in _entries(path):
            _check(entry)


def _entries(folder: Path) -> Iterator[Path]:
    """All that is below a folder. Links are not followed."""
    for path in sorted(folder.iterdir()):
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _entries(path)


def _check(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:  # another rank of this node has just swept it
        return
    if not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
        raise CheckpointError(
            f"{path} in the fast tier is neither a file nor a folder, so Keepstep did not write it; {_OUT}"
        )
    if found.st_uid != os.geteuid():
        raise CheckpointError(
            f"{path} in the fast tier belongs to user {found.st_uid}, not to {os.geteuid()}, who runs this; {_OUT}"
        )


_OUT = "remove it, or set checkpoint.local_dir to a folder of your own"
