"""Trains a SentencePiece tokenizer that loses nothing: decode(encode(text)) == text, whatever the text."""

import io
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data_pipeline.errors import DataError
from data_pipeline.sources.files import Part
from data_pipeline.sources.inputs import list_inputs
from data_pipeline.sources.readers import read_records
from data_pipeline.sources.records import ReadOptions
from data_pipeline.tokenizers.tokenizer import SENTENCEPIECE_FILE
from data_pipeline.whole_file import write_whole

MAX_SENTENCE_BYTES = 4000
"""SentencePiece skips longer ones (4,192 bytes), so text is cut into pieces of this size, after a newline or space."""

CHARACTER_COVERAGE = 0.9995
"""Share of the text whose characters get a token of their own; the others are spelled in bytes."""

_BYTES_AND_CONTROL = 256 + 3
# U+2585 stands for "unknown" inside SentencePiece and U+2581 for a space; it skips sentences with the former.
_UNTRAINABLE = str.maketrans({"\0": " ", "\u2585": " ", "\u2581": " "})


@dataclass(frozen=True)
class Trained:
    """What came out."""

    file: Path
    vocab_size: int
    sentences: int
    text_bytes: int


def train_sentencepiece(
    texts: Iterable[str],
    out: Path,
    *,
    vocab_size: int,
    kind: Literal["bpe", "unigram"] = "bpe",
    max_bytes: int = 256 << 20,
    threads: int = 1,
) -> Trained:
    """Write `out`/tokenizer.model, trained on at most `max_bytes` of text. DataError if the size does not fit it."""
    from sentencepiece import SentencePieceTrainer

    counted = _Counted(texts, max_bytes)
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=counted.sentences(),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=kind,
            byte_fallback=True,
            character_coverage=CHARACTER_COVERAGE,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=threads,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(_explain(str(error), vocab_size, counted)) from None
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / SENTENCEPIECE_FILE, model.getvalue())
    return Trained(out / SENTENCEPIECE_FILE, vocab_size, counted.number, counted.bytes)


def sample_texts(inputs: Sequence[str], options: ReadOptions, max_bytes: int) -> Iterator[str]:
    """Documents from the beginning of every input file in turn, no file giving much more than its fair share."""
    files = list_inputs(inputs)
    share = max(max_bytes // len(files), 1 << 16)
    given = 0
    for file in files:
        from_file = 0
        for record in read_records(file, Part(0), options):
            if record.text:
                yield record.text
                from_file += len(record.text)
            if from_file >= share or given + from_file >= max_bytes:
                break
        given += from_file


class _Counted:
    """The sentences for training, and how many there were."""

    def __init__(self, texts: Iterable[str], max_bytes: int) -> None:
        self._texts, self._max_bytes = texts, max_bytes
        self.number = self.bytes = 0
        self.characters: Counter[str] = Counter()

    def sentences(self) -> Iterator[str]:
        for text in self._texts:
            for sentence in cut_sentences(text.translate(_UNTRAINABLE)):
                if self.bytes >= self._max_bytes:
                    return
                self.number += 1
                self.bytes += len(sentence.encode())
                self.characters.update(sentence)
                yield sentence


def _smallest(characters: Counter[str]) -> int:
    """The smallest vocabulary: every byte, the control tokens, and the characters that make up the coverage."""
    wanted = CHARACTER_COVERAGE * characters.total()
    covered = itertools.accumulate(count for _, count in characters.most_common())
    return _BYTES_AND_CONTROL + 1 + sum(1 for count in covered if count < wanted)


def cut_sentences(text: str) -> Iterator[str]:
    """Pieces of at most MAX_SENTENCE_BYTES that make up the text, cut after a newline, else a space, else anywhere."""
    limit = MAX_SENTENCE_BYTES // 4  # a character has at most 4 bytes
    start = 0
    while start < len(text):
        end = start + limit
        if end < len(text):
            end = next((i + 1 for mark in "\n " if (i := text.rfind(mark, start, end)) > start), end)
        yield text[start:end]
        start = end


def _explain(message: str, vocab_size: int, counted: _Counted) -> str:
    of_text = f"this text ({counted.number:,} pieces, {counted.bytes:,} bytes, {len(counted.characters):,} characters)"
    if not counted.bytes:
        return "there is no text to train a tokenizer on; check the inputs and --text-key"
    if high := re.search(r"too high \(\d+\).*<= (\d+)", message):
        return (
            f"a vocabulary of {vocab_size} is too large for {of_text}; the allowed range is "
            f"{_smallest(counted.characters)} to {high[1]}: lower --vocab-size or give more text"
        )
    if low := re.search(r"smaller than required_chars[^\d]*(\d+) vs (\d+)", message):
        return (
            f"a vocabulary of {vocab_size} is too small for {of_text}; it must be at least {low[2]} "
            f"(256 bytes, 3 control tokens and the frequent characters): raise --vocab-size"
        )
    return f"SentencePiece could not train a vocabulary of {vocab_size} on {of_text}: {message}"
