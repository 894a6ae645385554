import os
from pathlib import Path

import fsspec
import pytest

from data_pipeline.errors import DataError
from data_pipeline.sources.files import InputFile, check_unchanged, open_input
from data_pipeline.sources.inputs import list_inputs


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


def test_any_fsspec_address_is_listed() -> None:
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


def test_an_address_with_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(DataError, match=r"cannot list what://ever: .*check the address"):
        list_inputs(["what://ever"])


def test_a_data_set_saved_by_datasets_is_not_read_as_files(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"give it as hf:"):
        list_inputs([str(tmp_path)])


def test_linked_folders_are_followed_once_and_circles_end(tmp_path: Path) -> None:
    folder, other = tmp_path / "in", tmp_path / "other"
    for name in ("in/a.txt", "in/real/b.txt", "other/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (folder / "linked").symlink_to(other)
    (folder / "again").symlink_to(folder / "real")
    (other / "circle").symlink_to(folder)
    assert names(list_inputs([str(folder)]), folder) == ["a.txt", "linked/c.txt", "real/b.txt"]


def test_a_broken_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").symlink_to(tmp_path / "missing")
    with pytest.raises(DataError, match=r"x.jsonl is a link to a file that does not exist; restore the file or delete"):
        list_inputs([str(tmp_path)])


def test_a_file_that_is_named_twice_is_read_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "z.txt").symlink_to(folder / "a.txt")
    inputs = [str(folder / "b.txt"), str(folder), str(folder / "deep" / ".." / "a.txt"), f"file://{folder}/b.txt"]
    assert names(list_inputs(inputs), folder) == ["b.txt", "a.txt", "deep/c.jsonl"]
    assert "4 input files are named more than once; each is read once" in caplog.text


@pytest.mark.parametrize("name", ["a::b.txt", "zip::c.txt", "[1]*?.txt", "a#b.txt", "a b%20.txt"])
def test_a_local_name_may_have_any_characters(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("text")
    (file,) = list_inputs([str(tmp_path / name)])
    with open_input(file.address) as opened:
        assert opened.read() == b"text"
    assert list_inputs([str(tmp_path)]) == [file]


def test_a_change_at_equal_size_changes_the_version(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    (tmp_path / "a").write_text("one")
    memory.pipe("/versions/a", b"one")
    inputs = [str(tmp_path / "a"), "memory://versions/a"]
    before = list_inputs(inputs)
    for file in before:
        check_unchanged(file)
    (tmp_path / "a").write_text("two")
    os.utime(tmp_path / "a", ns=(0, 1))
    memory.pipe("/versions/a", b"two")
    for old, new in zip(before, list_inputs(inputs), strict=True):
        assert old.size == new.size
        assert old.version != new.version
        with pytest.raises(DataError, match=r"a changed while the build was reading it"):
            check_unchanged(old)
