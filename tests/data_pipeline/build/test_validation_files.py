from pathlib import Path

import numpy as np
import pytest

from data_pipeline.build.options import BuildOptions
from data_pipeline.build.prepare import build_dataset
from data_pipeline.errors import DataError
from data_pipeline.shards.dataset import DataSet
from data_pipeline.shards.document_hashes import read_hashes
from data_pipeline.shards.manifest import TRAIN, VALIDATION
from tests.data_pipeline.sets import documents, write_jsonl

OPTIONS = BuildOptions(seq_len=32, validation_share=0.0, deduplicate=True)
TEXTS = documents(60)


def test_documents_of_the_given_files_are_the_validation_split_and_are_not_trained_on(
    tokenizer: Path, tmp_path: Path
) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", TEXTS[:50])
    validation = write_jsonl(tmp_path / "validation.jsonl", TEXTS[45:])
    manifest = build_dataset([str(train)], tmp_path / "set", tokenizer, OPTIONS, validation=[str(validation)])
    assert manifest is not None
    assert (manifest.splits[TRAIN].documents, manifest.splits[VALIDATION].documents) == (45, 15)
    assert manifest.counts["dropped: copy of a validation document"] == 5
    dataset = DataSet(str(tmp_path / "set"))
    hashes = [read_hashes(dataset, split, 2**64) for split in (TRAIN, VALIDATION)]
    assert [len(found) for found in hashes] == [45, 15]
    assert not len(np.intersect1d(hashes[0], hashes[1]))


def test_a_validation_file_in_an_input_folder_is_not_trained_on(tokenizer: Path, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", TEXTS[:40])
    validation = [str(write_jsonl(folder / "b.jsonl", TEXTS[40:]))]
    manifest = build_dataset([str(folder)], tmp_path / "set", tokenizer, OPTIONS, validation=validation)
    assert manifest is not None
    assert (manifest.splits[TRAIN].documents, manifest.splits[VALIDATION].documents) == (40, 20)
    with pytest.raises(DataError, match=r"every input is a --validation file as well"):
        build_dataset(validation, tmp_path / "other", tokenizer, OPTIONS, validation=validation)


def test_other_validation_files_are_another_data_set(tokenizer: Path, tmp_path: Path) -> None:
    files = [str(write_jsonl(tmp_path / f"{n}.jsonl", TEXTS[20 * n : 20 * n + 20])) for n in range(3)]
    build_dataset(files[:2], tmp_path / "set", tokenizer, OPTIONS, validation=files[2:])
    with pytest.raises(DataError, match=r"is a data set of other inputs"):
        build_dataset(files[:1], tmp_path / "set", tokenizer, OPTIONS, validation=files[1:])


def test_inputs_that_are_all_validation_documents_are_refused(tokenizer: Path, tmp_path: Path) -> None:
    train, copy = (write_jsonl(tmp_path / name, TEXTS[:9]) for name in ("a.jsonl", "b.jsonl"))
    with pytest.raises(DataError, match=r"every document is in the --validation files as well"):
        build_dataset([str(train)], tmp_path / "set", tokenizer, OPTIONS, validation=[str(copy)])
