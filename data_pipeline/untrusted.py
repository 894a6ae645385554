"""Names, files and JSON that anyone may have written, checked before they are used. Standard library only.

A name from a manifest, an index or a checkpoint becomes a path through `safe_path` alone. A file of such a folder is
opened by `open_file`, which never waits: a FIFO, a socket or a device is refused by its name. Metadata is read whole by
`read_file`, which has a limit, and parsed by `parse_json`, which raises nothing but ValueError.
"""

import errno
import json
import os
import re
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError

METADATA_BYTES = 1 << 30
"""Largest size of a file that is read whole: a manifest, an index, a configuration or a tokenizer."""
MAX_DEPTH = 64
"""Levels of objects and lists that a JSON text may have."""
PLAIN = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
"""Regular expression of a plain name: no separator, no dot first, no character that a shell or a terminal treats."""

_NAME = re.compile(rf"{PLAIN}(?:/{PLAIN}){{0,3}}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_KINDS = {
    stat.S_IFIFO: "a FIFO (named pipe)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class UnsafeNameError(DataError):
    """A name that someone else chose would leave its folder, or is not one of those that its place can have."""


class NotAFileError(OSError):
    """A path is no regular file, or leads out of its folder."""

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


class TooLargeError(NotAFileError):
    """A file is larger than a file of its kind may be."""


def check_name(name: Any, known: Collection[str] | None = None) -> str:
    """The name, relative to a folder. UnsafeNameError unless it is made of plain names, and one of `known` if given."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UnsafeNameError(
            f"the name {str(name)[:200]!r} is not safe; a name has letters, digits, '.', '_' and '-', does not begin "
            "with '.' or '-', and stays in its folder"
        )
    if known is not None and name not in known:
        raise UnsafeNameError(f"the name {name!r} is not one of {', '.join(sorted(known))}")
    return name


def safe_path(folder: Path, name: Any, known: Collection[str] | None = None) -> Path:
    """The path of that name in the folder, to read or to write. UnsafeNameError for a name that `check_name` refuses.

    NotAFileError if there is something else than a file at the path, or if a link leads from there out of the
    folder."""
    path = folder / check_name(name, known)
    if os.path.lexists(path):
        _check_inside(path, folder)
        _check_kind(path, path.lstat() if not path.exists() else path.stat())
    else:
        _check_inside(path.parent, folder)
    return path


def check_file(path: Path) -> os.stat_result:
    """The status of the regular file at `path`. NotAFileError for anything else, FileNotFoundError for nothing."""
    status = path.stat()
    _check_kind(path, status)
    return status


def open_file(path: Path, inside: Path | None = None) -> int:
    """A descriptor that reads the regular file at `path`. It never waits for a writer.

    NotAFileError for anything else, and for a link that leads out of the folder `inside`. Other OSErrors as from
    `os.open`."""
    check_file(path)  # before it is opened: opening a device may have an effect
    if inside is not None:
        _check_inside(path, inside)
    return _open(path, os.O_RDONLY)


def open_to_append(path: Path, mode: int = 0o644) -> int:
    """A descriptor that appends to the regular file at `path`, which is created if missing. It never waits.

    NotAFileError for anything but a regular file, and for a link that leads out of its folder. Other OSErrors as from
    `os.open`."""
    _check_inside(path, path.parent)
    return _open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode)


def _open(path: Path, flags: int, mode: int = 0o777) -> int:
    """A descriptor of a regular file, opened without waiting. NotAFileError for anything else."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, mode)
    try:
        _check_kind(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_file(path: Path, inside: Path | None = None, limit: int = METADATA_BYTES) -> bytes:
    """The whole content of a regular file. TooLargeError above `limit` bytes; otherwise errors as from `open_file`."""
    with os.fdopen(open_file(path, inside), "rb") as file:
        check_size(str(path), os.fstat(file.fileno()).st_size, limit)
        return file.read(limit)


def check_size(name: str, size: int, limit: int = METADATA_BYTES) -> int:
    """The size. TooLargeError above `limit` bytes."""
    if size > limit:
        raise TooLargeError(
            errno.EINVAL, f"has {size:,} bytes, more than the {limit:,} that such a file may have", name
        )
    return size


def parse_json(data: bytes, *, surrogates: bool = False) -> Any:
    """The value of a JSON text in UTF-8. ValueError for anything else.

    Repeated keys, NaN and more than MAX_DEPTH levels are refused. So are lone surrogates, unless `surrogates`: names of
    files that are not UTF-8 have them."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_without_repeated_keys, parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_deep() from None
    _check_depth(value)
    if not surrogates and _SURROGATE.search(data):
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError, a ValueError, for a lone one
    return value


def _check_depth(value: Any) -> None:
    """ValueError if the value has more than MAX_DEPTH levels of objects and lists."""
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        inner: list[Any] = [parent.values() if type(parent) is dict else parent for parent in level]
        level = [child for children in inner for child in children if type(child) is dict or type(child) is list]
        if not level:
            return
    raise _too_deep()


def in_one_line(error: BaseException | str) -> str:
    """What an error of a library says, in one line of printable characters. Libraries repeat what they read."""
    text = " ".join(str(error).split())[:300]
    return "".join(character if character.isprintable() else "?" for character in text)


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)[:200]!r} is given twice")
    return found


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _check_kind(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a link to nothing")
        raise NotAFileError(errno.EINVAL, f"is {kind}, not a file", str(path))


def _check_inside(path: Path, folder: Path) -> None:
    real, root = os.path.realpath(path), os.path.realpath(folder)
    if os.path.commonpath([real, root]) != root:
        raise NotAFileError(errno.EINVAL, f"is a link that leads out of {folder}", str(path))
