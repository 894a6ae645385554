"""Which files are read, and how the work on them is cut into tasks.

An input is a file, a folder (all files below it), a glob, any address that fsspec knows (s3://, gs://, https://, ...),
or `hf:NAME[@CONFIG][:SPLIT]` for a data set of Hugging Face, by name or local path. The cut depends on the files alone,
never on the number of workers.
"""

import glob
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fsspec.core import url_to_fs

from data_pipeline.errors import DataError
from data_pipeline.sources.files import HUGGING_FACE, InputFile, Part, Task, is_address


def list_inputs(inputs: Sequence[str]) -> list[InputFile]:
    """In the order of the inputs, sorted by name within a folder or glob. DataError if one of them matches nothing."""
    files: list[InputFile] = []
    for text in inputs:
        if text.startswith(HUGGING_FACE):
            from data_pipeline.sources.hugging_face import list_hugging_face

            found = list_hugging_face(text)
        elif is_address(text):
            found = list(_list_remote(text))
        else:
            found = list(_list_local(text))
        if not found:
            raise DataError(f"no file matches {text}; check the path (folders are searched, hidden files left out)")
        files += found
    return files


def _list_local(text: str) -> Iterator[InputFile]:
    path = Path(text)
    if path.is_file():
        paths = [path]
    elif path.is_dir():
        if _is_saved_dataset(path):
            raise DataError(f"{text} is a data set saved by `datasets`; give it as hf:{text}")
        below = (found for found in path.rglob("*") if not _is_hidden(found.relative_to(path)))
        paths = sorted((found for found in below if found.is_file()), key=str)
    else:
        found_names = sorted(glob.glob(text, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
        paths = [Path(found) for found in found_names if Path(found).is_file()]
    for found in paths:
        yield InputFile(str(found), found.stat().st_size)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "__pycache__")) for part in path.parts)


def _is_saved_dataset(path: Path) -> bool:
    return (path / "dataset_info.json").is_file() and (path / "state.json").is_file()


def _list_remote(text: str) -> Iterator[InputFile]:
    try:
        system, path = url_to_fs(text)
        if glob.has_magic(path):
            found = system.glob(path, detail=True)
        elif system.isdir(path) and not system.isfile(path):
            found = system.find(path, detail=True)
        else:
            found = {path: system.info(path)}
    except (OSError, ImportError, ValueError) as error:
        raise DataError(f"cannot list {text}: {error!r}; check the address and the credentials") from error
    for path, info in sorted(found.items()):
        if info["type"] == "file":
            yield InputFile(system.unstrip_protocol(path), info.get("size"))


def cut_into_tasks(
    files: Sequence[InputFile], task_bytes: int, cuts: Callable[[InputFile], list[Part] | None]
) -> list[Task]:
    """Every record of every file in exactly one task. `cuts` says how a large file may be cut, if at all."""
    tasks: list[Task] = []
    together: list[Part] = []
    size = 0
    for number, file in enumerate(files):
        alone = file.size is None or file.size > task_bytes
        if together and (alone or size + (file.size or 0) > task_bytes):
            tasks.append(tuple(together))
            together, size = [], 0
        if alone:
            parts = (cuts(file) if file.size is not None else None) or [Part(number)]
            tasks += [(replace(part, file=number),) for part in parts]
        else:
            together.append(Part(number))
            size += file.size or 0
    if together:
        tasks.append(tuple(together))
    return tasks
