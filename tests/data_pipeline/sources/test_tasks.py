from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.sources.files import InputFile, Part
from data_pipeline.sources.tasks import divide_into_tasks


@given(sizes=st.lists(st.one_of(st.none(), st.integers(0, 300)), max_size=30), task_bytes=st.integers(1, 100))
def test_every_byte_is_in_exactly_one_task(sizes: list[int | None], task_bytes: int) -> None:
    files = [InputFile(str(number), size) for number, size in enumerate(sizes)]

    def cut(file: InputFile) -> list[Part] | None:
        if int(file.address) % 2:
            return None
        return [
            Part(0, start, min(start + task_bytes, file.size or 0)) for start in range(0, file.size or 0, task_bytes)
        ]

    tasks = divide_into_tasks(files, task_bytes, cut)
    parts = [part for task in tasks for part in task]
    assert [part.file for part in parts] == sorted(part.file for part in parts)
    for number, file in enumerate(files):
        of_file = [part for part in parts if part.file == number]
        if of_file[0].end is None:
            assert of_file == [Part(number)]
        else:
            assert [part.start for part in of_file[1:]] == [part.end for part in of_file[:-1]]
            assert (of_file[0].start, of_file[-1].end) == (0, file.size)
    for task in tasks:
        together = sum((part.end - part.start) if part.end is not None else files[part.file].size or 0 for part in task)
        assert len(task) == 1 or together <= task_bytes
