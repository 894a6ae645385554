import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.tokenizers.tiktoken_twin import Encode, tiktoken_twin
from tests.data_pipeline.tokenizers.test_tokenizer import train_byte_bpe

pytest.importorskip("tiktoken", reason="an optional dependency")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_byte_bpe(tmp_path_factory.mktemp("bpe")) / "tokenizer.json"


def hugging_face(file: Path) -> Encode:
    loaded = tokenizers.Tokenizer.from_file(str(file))
    loaded.encode_special_tokens = True
    return lambda texts: [loaded.encode(text, add_special_tokens=False).ids for text in texts]


def changed(file: Path, out: Path, **changes: object) -> Path:
    content = json.loads(file.read_text())
    content.update(changes)
    out.write_text(json.dumps(content))
    return out


@given(texts=st.lists(st.text(st.characters(codec="utf-8")), max_size=4))
def test_the_twin_gives_the_same_ids(file: Path, texts: list[str]) -> None:
    twin = tiktoken_twin(file, hugging_face(file))
    assert twin is not None
    assert twin(texts) == hugging_face(file)(texts)


def test_a_normalizer_rules_the_twin_out(file: Path, tmp_path: Path) -> None:
    assert tiktoken_twin(changed(file, tmp_path / "x.json", normalizer={"type": "NFC"}), hugging_face(file)) is None


def test_merges_out_of_the_order_of_ids_rule_the_twin_out(file: Path, tmp_path: Path) -> None:
    model = json.loads(file.read_text())["model"]
    model["merges"] = model["merges"][::-1]
    assert tiktoken_twin(changed(file, tmp_path / "x.json", model=model), hugging_face(file)) is None


def test_other_ids_rule_the_twin_out(file: Path) -> None:
    right = hugging_face(file)
    assert tiktoken_twin(file, lambda texts: [[*ids, 1] for ids in right(texts)]) is None


def test_a_batch_that_differs_goes_to_hugging_face(file: Path) -> None:
    right = hugging_face(file)
    calls: list[int] = []

    def later_other(texts):  # agrees while it is probed, then not
        calls.append(len(texts))
        return right(texts) if len(calls) == 1 else [[7] for _ in texts]

    twin = tiktoken_twin(file, later_other)
    assert twin is not None
    assert twin(["one", "two"]) == [[7], [7]]
