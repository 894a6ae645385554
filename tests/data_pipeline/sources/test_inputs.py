from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.errors import DataError
from data_pipeline.sources.files import InputFile, Part
from data_pipeline.sources.inputs import cut_into_tasks, list_inputs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.txt", "deep/c.jsonl", ".hidden", "deep/.git/x", "__pycache__/y"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def names(files: list[InputFile], folder: Path) -> list[str]:
    return [str(Path(file.address).relative_to(folder)) for file in files]


def test_a_folder_gives_all_files_below_it_in_order(folder: Path) -> None:
    assert names(list_inputs([str(folder)]), folder) == ["a.txt", "b.txt", "deep/c.jsonl"]


def test_inputs_keep_their_order_and_globs_are_sorted(folder: Path) -> None:
    inputs = [str(folder / "deep" / "c.jsonl"), str(folder / "*.txt")]
    assert names(list_inputs(inputs), folder) == ["deep/c.jsonl", "a.txt", "b.txt"]
    assert names(list_inputs([str(folder / "**" / "*.jsonl")]), folder) == ["deep/c.jsonl"]


def test_any_address_of_fsspec_is_listed() -> None:
    memory = fsspec.filesystem("memory")
    for name in ("b", "a", "deep/c"):
        memory.pipe(f"/inputs/{name}", b"text")
    for address in ("memory://inputs", "memory://inputs/**"):
        found = list_inputs([address])
        assert [file.address for file in found] == [f"memory:///inputs/{name}" for name in ("a", "b", "deep/c")]
        assert [file.size for file in found] == [4, 4, 4]
    assert len(list_inputs(["memory://inputs/a"])) == 1


@pytest.mark.parametrize("text", ["nothing-here", "nothing/*.txt", "memory://nothing/*"])
def test_an_input_that_matches_nothing_is_refused(text: str) -> None:
    with pytest.raises(DataError, match=r"no file matches|cannot list"):
        list_inputs([text])


def test_an_address_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(DataError, match=r"cannot list what://ever: .*check the address"):
        list_inputs(["what://ever"])


def test_a_data_set_saved_by_datasets_is_not_read_as_files(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"give it as hf:"):
        list_inputs([str(tmp_path)])


@given(sizes=st.lists(st.one_of(st.none(), st.integers(0, 300)), max_size=30), task_bytes=st.integers(1, 100))
def test_every_byte_is_in_exactly_one_task(sizes: list[int | None], task_bytes: int) -> None:
    files = [InputFile(str(number), size) for number, size in enumerate(sizes)]

    def cuts(file: InputFile) -> list[Part] | None:
        if int(file.address) % 2:
            return None
        return [
            Part(0, start, min(start + task_bytes, file.size or 0)) for start in range(0, file.size or 0, task_bytes)
        ]

    tasks = cut_into_tasks(files, task_bytes, cuts)
    parts = [part for task in tasks for part in task]
    assert [part.file for part in parts] == sorted(part.file for part in parts)
    for number, file in enumerate(files):
        mine = [part for part in parts if part.file == number]
        if mine[0].end is None:
            assert mine == [Part(number)]
        else:
            assert [part.start for part in mine[1:]] == [part.end for part in mine[:-1]]
            assert (mine[0].start, mine[-1].end) == (0, file.size)
    for task in tasks:
        together = sum((part.end - part.start) if part.end is not None else files[part.file].size or 0 for part in task)
        assert len(task) == 1 or together <= task_bytes
