from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.build import selection
from data_pipeline.build.cleaning import content_hash
from data_pipeline.build.selection import DROPPED, IN_TRAIN, IN_VALIDATION, choice_file, select_documents
from data_pipeline.build.tokenizing import DOCUMENT, task_files
from data_pipeline.errors import DataError


def write_tasks(work: Path, tasks: list[list[str]]) -> None:
    for number, texts in enumerate(tasks):
        table = np.zeros(len(texts), DOCUMENT)
        for row, text in enumerate(texts):
            table[row]["hash_high"], table[row]["hash_low"] = content_hash(text)
            table[row]["length"] = len(text)
        table.tofile(task_files(work, number).documents)


def choices(work: Path, tasks: int) -> list[list[int]]:
    return [np.fromfile(choice_file(work, number), np.uint8).tolist() for number in range(tasks)]


@pytest.mark.parametrize("at_once", [1, 1 << 24])
def test_copies_are_dropped_in_the_whole_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(selection, "HASHES_AT_ONCE", at_once)
    write_tasks(tmp_path, [["a", "b", "a"], [], ["b", "c", "a"]])
    counts: Counter[str] = Counter()
    selected = select_documents(tmp_path, 3, 0.0, True, counts)
    assert choices(tmp_path, 3) == [[IN_TRAIN, IN_TRAIN, DROPPED], [], [DROPPED, IN_TRAIN, DROPPED]]
    assert counts["dropped: copy of another document"] == 3
    assert sum(selected.lengths.values()) == 3


def test_copies_are_kept_without_deduplication(tmp_path: Path) -> None:
    write_tasks(tmp_path, [["a", "a"]])
    select_documents(tmp_path, 1, 0.0, False, Counter())
    assert choices(tmp_path, 1) == [[IN_TRAIN, IN_TRAIN]]


def test_about_the_wanted_share_is_validation_and_copies_stay_in_one_split(tmp_path: Path) -> None:
    texts = [str(number) for number in range(2000)]
    write_tasks(tmp_path, [texts, texts])
    select_documents(tmp_path, 2, 0.1, False, Counter())
    first, second = choices(tmp_path, 2)
    assert first == second
    assert 150 < first.count(IN_VALIDATION) < 250


def test_the_split_of_a_document_depends_only_on_its_text(tmp_path: Path) -> None:
    write_tasks(tmp_path, [[str(number) for number in range(100)]])
    select_documents(tmp_path, 1, 0.1, False, Counter())
    (before,) = choices(tmp_path, 1)
    write_tasks(tmp_path, [["other"], [str(number) for number in reversed(range(100))]])
    select_documents(tmp_path, 2, 0.1, False, Counter())
    assert choices(tmp_path, 2)[1] == before[::-1]


def test_at_least_one_of_two_different_documents_is_validation(tmp_path: Path) -> None:
    write_tasks(tmp_path, [["a", "b", "a"]])
    select_documents(tmp_path, 1, 1e-9, False, Counter())
    assert choices(tmp_path, 1)[0].count(IN_VALIDATION) in (1, 2)
    write_tasks(tmp_path, [["a"]])
    select_documents(tmp_path, 1, 1e-9, False, Counter())
    assert choices(tmp_path, 1) == [[IN_TRAIN]]


def test_an_input_without_documents_is_refused_with_the_reasons(tmp_path: Path) -> None:
    write_tasks(tmp_path, [[]])
    with pytest.raises(DataError, match=r"no documents remain \(3 dropped: empty\); check the inputs and --text-key"):
        select_documents(tmp_path, 1, 0.1, False, Counter({"dropped: empty": 3}))


def test_a_validation_share_that_leaves_nothing_to_train_on_is_refused(tmp_path: Path) -> None:
    write_tasks(tmp_path, [["a", "b"]])
    with pytest.raises(DataError, match=r"validation_share \(1.0\) leaves no document to train on"):
        select_documents(tmp_path, 1, 1.0, False, Counter())
