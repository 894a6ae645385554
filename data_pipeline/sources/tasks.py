"""How the input is divided into tasks. The division depends on the files alone, never on the number of workers."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from data_pipeline.sources.files import InputFile, Part

Task = tuple[Part, ...]
"""The parts of files that one call tokenizes."""


def divide_into_tasks(
    files: Sequence[InputFile], task_bytes: int, cut: Callable[[InputFile], list[Part] | None]
) -> list[Task]:
    """Tasks that contain every record of every file exactly once.

    Neighbouring small files share a task of at most `task_bytes`. `cut` returns the parts of a larger file, or None if
    the file must be read as a whole."""
    tasks: list[Task] = []
    together: list[Part] = []
    size = 0
    for number, file in enumerate(files):
        alone = file.size is None or file.size > task_bytes
        if together and (alone or size + (file.size or 0) > task_bytes):
            tasks.append(tuple(together))
            together, size = [], 0
        if alone:
            parts = (cut(file) if file.size is not None else None) or [Part(number)]
            tasks += [(replace(part, file=number),) for part in parts]
        else:
            together.append(Part(number))
            size += file.size or 0
    if together:
        tasks.append(tuple(together))
    return tasks
