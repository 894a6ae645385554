"""Finds the files that the user's inputs name.

An input is a file, a folder (all files below it), a glob, any address that fsspec knows (s3://, gs://, https://, ...),
or `hf:NAME[@CONFIG][:SPLIT]` for a Hugging Face data set, by name or local path.
"""

import glob
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from fsspec.core import url_to_fs

from data_pipeline.credentials import check_address, with_credentials, without_credentials
from data_pipeline.errors import DataError
from data_pipeline.sources.files import InputFile, is_remote, local_file, remote_file
from data_pipeline.sources.hugging_face import is_hugging_face, list_hugging_face

log = logging.getLogger(__name__)

_LOCAL_PROTOCOLS = ("file://", "local://")


def list_inputs(inputs: Sequence[str]) -> list[InputFile]:
    """The files of all inputs, in the order of the inputs; files of a folder or glob are sorted by name.

    A file that several inputs or links name is listed once. DataError if an input matches nothing."""
    files: dict[str, InputFile] = {}
    repeated = 0
    for text in inputs:
        if not (found := _list(text)):
            raise DataError(f"no file matches {text}; check the path (hidden files in folders are ignored)")
        for file in found:
            key = identity(file)
            repeated += key in files
            files.setdefault(key, file)
    if repeated:
        log.warning("%d input files are named more than once; each is read once", repeated)
    return list(files.values())


def identity(file: InputFile) -> str:
    """Equal for two names of the same file."""
    local = not is_remote(file.address) and not is_hugging_face(file.address)
    return os.path.realpath(file.address) if local else file.address


def _list(text: str) -> list[InputFile]:
    if is_hugging_face(text):
        return list_hugging_face(text)
    for protocol in _LOCAL_PROTOCOLS:
        text = text.removeprefix(protocol)
    return list(_list_remote(text) if is_remote(text) else _list_local(text))


def _list_local(text: str) -> Iterator[InputFile]:
    path = Path(text)
    if path.exists() and not path.is_dir():
        paths = [path]
    elif path.is_dir():
        if _is_saved_dataset(path):
            raise DataError(f"{text} is a data set saved by `datasets`; give it as hf:{text}")
        paths = sorted(_files_below(path), key=str)
    else:
        names = sorted(glob.glob(text, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
        paths = [Path(name) for name in names if not Path(name).is_dir()]
    for found in paths:
        try:
            yield local_file(found)
        except OSError as error:  # a FIFO would hang the build, and /dev/zero would never end
            raise DataError(f"cannot read {found}: {error}; name files, or folders that have nothing else") from None


def _files_below(folder: Path) -> list[Path]:
    """All files below the folder. Linked folders are followed, each folder once, its own name before links to it."""
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()
    waiting = [folder]
    while waiting:
        links: list[Path] = []
        for start in waiting:
            for at, folders, files in os.walk(start, onerror=_refuse):
                status = os.stat(at)  # noqa: PTH116 - `at` is a string
                if (status.st_dev, status.st_ino) in seen:
                    folders.clear()
                    continue
                seen.add((status.st_dev, status.st_ino))
                folders[:] = sorted(name for name in folders if not _is_hidden(name))
                links += [path for name in folders if (path := Path(at, name)).is_symlink()]
                found += [_existing(Path(at, name)) for name in files if not _is_hidden(name)]
        waiting = links
    return found


def _existing(path: Path) -> Path:
    if path.is_symlink() and not path.exists():
        raise DataError(f"{path} is a link to a file that does not exist; restore the file or delete the link")
    return path


def _refuse(error: OSError) -> None:
    raise DataError(f"cannot list {error.filename}: {error.strerror}; change its permissions or move it") from error


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "__pycache__"))


def _is_saved_dataset(path: Path) -> bool:
    return (path / "dataset_info.json").is_file() and (path / "state.json").is_file()


def _list_remote(text: str) -> Iterator[InputFile]:
    try:
        address = with_credentials(check_address(text))
    except ValueError as error:
        raise DataError(str(error)) from None
    try:
        system, path = url_to_fs(address)
        if glob.has_magic(path):
            found = system.glob(path, detail=True)
        elif system.isdir(path) and not system.isfile(path):
            found = system.find(path, detail=True)
        else:
            found = {path: system.info(path)}
    except Exception as error:  # object-store libraries raise many types
        raise DataError(f"cannot list {text}: {error!r}; check the address and the credentials") from error
    for path, info in sorted(found.items()):
        if info["type"] == "file":
            yield remote_file(without_credentials(system.unstrip_protocol(path), text), info)
