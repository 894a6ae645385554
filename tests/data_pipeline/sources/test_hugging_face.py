from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from data_pipeline.sources.files import InputFile, Part
from data_pipeline.sources.hugging_face import list_hugging_face, parse_address
from data_pipeline.sources.readers import read_records
from data_pipeline.sources.records import ReadOptions, Record
from tests.data_pipeline.sets import write_jsonl


def read(address: str, **options: str) -> list[Record]:
    files = list_hugging_face(address)
    return [r for file in files for r in read_records(file, Part(0), ReadOptions(**options))]  # type: ignore[arg-type]


def test_an_address_names_config_and_split() -> None:
    assert parse_address("hf:user/name") == ("user/name", None, "train")
    assert parse_address("hf:user/name@config:test") == ("user/name", "config", "test")


def test_a_folder_of_files_is_streamed_file_by_file(tmp_path: Path) -> None:
    for number in range(3):
        write_jsonl(tmp_path / f"{number}.jsonl", [f"{number} a", f"{number} b"])
    files = list_hugging_face(f"hf:{tmp_path}")
    assert len(files) == 3
    assert [record.text for record in read(f"hf:{tmp_path}")] == ["0 a", "0 b", "1 a", "1 b", "2 a", "2 b"]


def test_a_saved_data_set_is_read_with_its_null_rows(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": ["a", None, "b"]}).save_to_disk(tmp_path / "one")
    assert read(f"hf:{tmp_path / 'one'}") == [Record("a"), Record(None, "text is null"), Record("b")]
    both = datasets.DatasetDict({"test": datasets.Dataset.from_dict({"text": ["c"]})})
    both.save_to_disk(tmp_path / "both")
    assert read(f"hf:{tmp_path / 'both'}:test") == [Record("c")]


def test_a_missing_key_is_refused_with_the_keys_found(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "x.jsonl", ["a"], key="body")
    with pytest.raises(DataError, match=r"has the key 'text' \(found: body\); set --text-key"):
        read(f"hf:{tmp_path}")
    assert read(f"hf:{tmp_path}", text_key="body") == [Record("a")]


def test_a_data_set_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot open hf:.*/none with `datasets`"):
        list_hugging_face(f"hf:{tmp_path / 'none'}")


def test_a_listed_address_names_one_shard_of_the_data_set(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "x.jsonl", ["a"])
    (file,) = list_hugging_face(f"hf:{tmp_path}")
    assert file == InputFile(f"hf:{tmp_path}#0/1", None, file.version)
    write_jsonl(tmp_path / "x.jsonl", ["b"])
    assert list_hugging_face(f"hf:{tmp_path}")[0].version != file.version
