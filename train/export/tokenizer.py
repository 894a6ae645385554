"""Writes a data set's tokenizer as Hugging Face files, which `AutoTokenizer` loads without SentencePiece.

`check_encodings` compares ids with the data set's tokenizer after each export, on texts that are hard to tokenize.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data_pipeline.tokenizers.tokenizer import HUGGING_FACE_FILE, SENTENCEPIECE_FILE, Tokenizer
from train.errors import ConfigError
from train.export.hard_texts import HARD_TEXTS
from train.export.sentencepiece_model import SPACE, SentencePieceModel

_CONFIG_FILE = "tokenizer_config.json"
_CLASS = "PreTrainedTokenizerFast"
"""The class that both transformers 4 and 5 load. Version 5 itself writes a name that version 4 does not know."""
_SPELLED = 32
"""Added tokens, at most, that the texts of the check spell out."""


def write_tokenizer(
    source: Path, end_of_document: int, seq_len: int, folder: Path, beginning_of_document: int | None = None
) -> None:
    """Write the tokenizer in the folder `source` to an exported model's folder, as Hugging Face files.

    Like training, it adds no token to a text but the one that begins a document, if there is one, and it reads a text
    that spells a special token as text."""
    if (source / SENTENCEPIECE_FILE).exists():
        model = SentencePieceModel(source / SENTENCEPIECE_FILE)
        fast, unknown = model.rewritten(), model.unknown
    else:
        fast, unknown = _without_additions(source / HUGGING_FACE_FILE), None
    begin, end = beginning_of_document, fast.id_to_token(end_of_document)
    if begin is not None:
        name = fast.id_to_token(begin)
        fast.post_processor = processors.TemplateProcessing(single=f"{name} $A", special_tokens=[(name, begin)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=fast,
        bos_token=end if begin is None else fast.id_to_token(begin),
        eos_token=end,
        unk_token=unknown,
        model_max_length=seq_len,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )
    wrapped.save_pretrained(folder)
    config: dict[str, Any] = json.loads((folder / _CONFIG_FILE).read_text())
    config["tokenizer_class"] = _CLASS
    (folder / _CONFIG_FILE).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _without_additions(file: Path) -> FastTokenizer:
    """The tokenizer of a `tokenizer.json` without what adds, cuts or pads tokens, which training does not do."""
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    processor = content.get("post_processor") or {}
    if processor.get("type") != "ByteLevel":  # this one changes offsets only
        content["post_processor"] = None
    return FastTokenizer.from_str(json.dumps(content | {"truncation": None, "padding": None}))


def check_encodings(ours: Tokenizer, folder: Path) -> int:
    """Compare ids with the exported tokenizer, with and without special tokens; return the number of texts compared.

    ConfigError that shows the first text whose ids differ. Known differences remain: U+2581, SentencePiece's mark for
    a space, in a text; and, with unigram, splits of equal probability."""
    theirs = AutoTokenizer.from_pretrained(folder, model_max_length=10**9)
    texts = [*HARD_TEXTS, *_spelled(theirs.backend_tokenizer)]
    begin = [] if ours.beginning_of_document is None else [ours.beginning_of_document]
    differing: list[str] = []
    for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
        for special, expected in ((True, [*begin, *ids]), (False, ids)):
            found = theirs.encode(text, add_special_tokens=special)
            if found != expected:
                differing.append(f"{text!r} is {_ids(expected)} in training, {_ids(found)} there")
                break
    if differing:
        raise ConfigError(
            f"transformers gives other ids than training on {len(differing)} of {len(texts)} texts; the first: "
            f"{differing[0]}. It cannot represent this tokenizer, so nothing was exported; use `keepstep generate`, or "
            "train with a tokenizer of `keepstep data tokenizer` or a byte-level tokenizer.json"
        )
    return len(texts)


def _spelled(fast: FastTokenizer) -> Iterator[str]:
    """Texts that spell added tokens: alone, between letters, between spaces, and twice."""
    for token in list(fast.get_added_tokens_decoder().values())[:_SPELLED]:
        spelled = token.content.replace(SPACE, " ")
        yield from (spelled, f"a{spelled}b", f"a {spelled} b", spelled * 2)


def _ids(ids: list[int]) -> str:
    return str(ids) if len(ids) <= 12 else f"{str(ids[:12])[:-1]}, ...]"
