"""The exported tokenizer gives the ids of training, or nothing is exported."""

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import AddedToken, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer

from data_pipeline.tokenizers.sentencepiece_training import train_sentencepiece
from data_pipeline.tokenizers.tokenizer import load_tokenizer
from train.errors import ConfigError
from train.export.hard_texts import HARD_TEXTS
from train.export.tokenizer import check_encodings, write_tokenizer

TEXTS = [
    "def f(x):\n\tif x:\n\t\treturn  1\n    # four spaces\n",
    "the cat sat on the mat; the dog sat on the log\n" * 5,
    "ﬁ 日本 \U0001f600\r\n",
    "doc one </s> <0x0A> still doc one <|endoftext|> still one <s> <unk>",
    "   a  b\t\n\n\n      c \x00\x01",
    "the river stone is under a green cloud over the falls",
]
LOSSLESS: dict[str, Any] = {
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
}


def trained_elsewhere(folder: Path, **options: Any) -> Path:
    """A folder with a SentencePiece model that was trained with these options."""
    folder.mkdir()
    sentencepiece.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
        sentence_iterator=iter([line for text in TEXTS[1:2] + TEXTS[5:] for line in text.splitlines()] * 20),
        model_prefix=str(folder / "tokenizer"),
        minloglevel=2,
        hard_vocab_limit=False,
        **options,
    )
    return folder


def exported_ids(source: Path, out: Path, text: str, **options: Any) -> list[int]:
    ours = load_tokenizer(source)
    write_tokenizer(source, ours.end_of_document, 64, out)
    assert check_encodings(ours, out) >= len(HARD_TEXTS)
    return AutoTokenizer.from_pretrained(out, **options).encode(text)


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp(request.param)
    train_sentencepiece(TEXTS * 20, root / "ours", vocab_size=310, kind=request.param)
    write_tokenizer(root / "ours", 2, 64, root / "theirs")
    return root / "ours", root / "theirs"


def test_both_give_the_same_ids_on_spaces_tabs_bytes_and_control_strings(exported: tuple[Path, Path]) -> None:
    ours, theirs = load_tokenizer(exported[0]), AutoTokenizer.from_pretrained(exported[1])
    assert check_encodings(ours, exported[1]) > len(HARD_TEXTS)
    for text in TEXTS:
        assert theirs.encode(text) == theirs.encode(text, add_special_tokens=False) == ours.encode(text)


def test_decoding_returns_the_text(exported: tuple[Path, Path]) -> None:
    ours, theirs = exported
    tokenizer = AutoTokenizer.from_pretrained(theirs)
    for text in TEXTS:
        assert tokenizer.decode(load_tokenizer(ours).encode(text)) == text


def test_begin_and_end_are_the_end_of_document_and_no_token_is_added_to_a_text(exported: tuple[Path, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported[1])
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.pad_token_id is None
    assert tokenizer.encode("the cat") == load_tokenizer(exported[0]).encode("the cat")


def test_the_class_is_one_that_transformers_4_knows(exported: tuple[Path, Path]) -> None:
    config = json.loads((exported[1] / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_special_tokens_in_a_text_are_read_only_on_request(exported: tuple[Path, Path]) -> None:
    assert 2 not in AutoTokenizer.from_pretrained(exported[1]).encode("a </s> b")
    assert 2 in AutoTokenizer.from_pretrained(exported[1], split_special_tokens=False).encode("a </s> b")


@pytest.mark.parametrize(
    "options",
    [
        LOSSLESS | {"model_type": "bpe", "vocab_size": 290, "add_dummy_prefix": True},  # as of Llama 2
        {"model_type": "unigram", "vocab_size": 40},  # as of T5: NFKC, dummy prefix, no extra spaces, unknown tokens
        {"model_type": "unigram", "vocab_size": 300, "byte_fallback": True, "normalization_rule_name": "nfkc_cf"},
        {"model_type": "bpe", "vocab_size": 300, "byte_fallback": True},
        {"model_type": "char", "vocab_size": 28},
        LOSSLESS | {"model_type": "bpe", "vocab_size": 300, "user_defined_symbols": ["<|fim|>", "river stone"]},
        LOSSLESS | {"model_type": "unigram", "vocab_size": 300, "user_defined_symbols": ["<|fim|>", "river▁stone"]},
    ],
    ids=["dummy prefix", "nfkc", "casefold", "nfkc and bytes", "characters", "symbols", "symbols of unigram"],
)
def test_a_sentencepiece_model_from_elsewhere_gives_the_ids_of_training(
    options: dict[str, Any], tmp_path: Path
) -> None:
    source = trained_elsewhere(tmp_path / "ours", **options)
    text = "  the river stone <|fim|>is ﬁne </s>"
    assert exported_ids(source, tmp_path / "theirs", text) == load_tokenizer(source).encode(text)


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "bpe", "vocab_size": 300, "byte_fallback": True, "treat_whitespace_as_suffix": True},
        {"model_type": "word", "vocab_size": 14},
        LOSSLESS | {"vocab_size": 300, "add_dummy_prefix": True, "user_defined_symbols": ["<|fim|>"]},
    ],
    ids=["space as suffix", "words", "dummy prefix and symbols"],
)
def test_a_tokenizer_that_would_give_other_ids_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    source = trained_elsewhere(tmp_path / "ours", **options)
    with pytest.raises(ConfigError, match=r"other ids than training on \d+ of \d+ texts; the first: '.*nothing was"):
        exported_ids(source, tmp_path / "theirs", "the cat")


def byte_level(folder: Path, template: str) -> Path:
    """A tokenizer.json whose post-processor follows the template, with special and ordinary added tokens."""
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("  ", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(name, number) for number, name in enumerate(special)]
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end_of_text|>", "add_bos_token": True}))
    return folder


@pytest.mark.parametrize("template", ["<|begin_of_text|> $A", "$A <|end_of_text|>"])
def test_a_post_processor_that_adds_tokens_is_not_exported(template: str, tmp_path: Path) -> None:
    source = byte_level(tmp_path / "ours", template)
    text = "the river <think>  <|begin_of_text|> a long text, longer than the truncation"
    assert exported_ids(source, tmp_path / "theirs", text) == load_tokenizer(source).encode(text)


@pytest.mark.parametrize("kind", ["sentencepiece", "byte level"])
def test_the_token_that_begins_each_document_is_added_as_in_training(kind: str, tmp_path: Path) -> None:
    if kind == "sentencepiece":
        source, begin, end = trained_elsewhere(tmp_path / "ours", model_type="bpe", vocab_size=60), "<s>", "</s>"
    else:
        source, begin, end = byte_level(tmp_path / "ours", "$A"), "<|begin_of_text|>", "<|end_of_text|>"
    control = {"beginning_of_document": begin, "end_of_document": end}
    (source / "keepstep.json").write_text(json.dumps(control))
    ours = load_tokenizer(source)
    first = ours.beginning_of_document
    assert first is not None
    write_tokenizer(source, ours.end_of_document, 64, tmp_path / "theirs", first)
    check_encodings(ours, tmp_path / "theirs")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert theirs.encode("the cat") == [first, *ours.encode("the cat")]
    assert theirs.encode("the cat", add_special_tokens=False) == ours.encode("the cat")
    assert (theirs.bos_token, theirs.eos_token) == (begin, end)
