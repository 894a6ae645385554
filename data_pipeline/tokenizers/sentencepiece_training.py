"""Trains a lossless SentencePiece tokenizer: decode(encode(text)) == text for any text."""

import io
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from data_pipeline.atomic_file import write_together
from data_pipeline.errors import DataError
from data_pipeline.progress import Advance, Progress, silent
from data_pipeline.sources.files import InputFile, Part
from data_pipeline.sources.readers import read_records
from data_pipeline.sources.records import ReadOptions
from data_pipeline.tokenizers.tokenizer import SENTENCEPIECE_FILE

MAX_SENTENCE_BYTES = 4000
"""Size of the pieces that text is cut into, after a newline or a space. SentencePiece skips pieces over 4,192 bytes."""

CHARACTER_COVERAGE = 0.9995
"""Share of the text whose characters get a token of their own. All other characters are encoded as bytes."""

DEFAULT_MAX_BYTES = 256 << 20
"""Bytes of text, at most, to train on, unless the caller allows more."""

_LOSSLESS: dict[str, Any] = {
    "byte_fallback": True,
    "character_coverage": CHARACTER_COVERAGE,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "allow_whitespace_only_pieces": True,
}
_CONTROL_IDS: dict[str, Any] = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}
_BYTES_AND_CONTROL = 256 + 3
# SentencePiece uses U+2585 for "unknown" and U+2581 for a space. It skips sentences that contain U+2585.
_UNTRAINABLE = str.maketrans({"\0": " ", "\u2585": " ", "\u2581": " "})


@dataclass(frozen=True)
class Trained:
    """A trained tokenizer, and the size of the text that it was trained on."""

    file: Path
    vocab_size: int
    sentences: int
    """Pieces of text, see MAX_SENTENCE_BYTES."""
    text_bytes: int


def train_sentencepiece(
    texts: Iterable[str],
    out: Path,
    *,
    vocab_size: int,
    kind: Literal["bpe", "unigram"] = "bpe",
    max_bytes: int = DEFAULT_MAX_BYTES,
    threads: int = 1,
    expected_bytes: int | None = None,
    progress: Progress = silent,
) -> Trained:
    """Trains on at most `max_bytes` of text and writes `out`/tokenizer.model. `expected_bytes` is for `progress` alone.

    DataError if there is no text or it does not allow `vocab_size` tokens."""
    from sentencepiece import SentencePieceTrainer

    with progress("reading text", expected_bytes, "bytes") as advance:
        sample = read_sample(texts, max_bytes, advance)
    model = io.BytesIO()
    try:
        with progress("training the tokenizer", None, ""):
            SentencePieceTrainer.train(
                sentence_iterator=iter(sample.sentences),
                model_writer=model,
                vocab_size=vocab_size,
                model_type=kind,
                **_LOSSLESS,
                **_CONTROL_IDS,
                num_threads=threads,
                minloglevel=2,
            )
    except RuntimeError as error:
        raise DataError(_explain(str(error), vocab_size, sample)) from None
    write_together(out, {SENTENCEPIECE_FILE: model.getvalue()})
    return Trained(out / SENTENCEPIECE_FILE, vocab_size, len(sample.sentences), sample.bytes)


def sample_texts(files: Sequence[InputFile], options: ReadOptions, max_bytes: int) -> Iterator[str]:
    """Documents from the beginning of each file in turn, about `max_bytes`. The files contribute equal shares."""
    share = max(max_bytes // len(files), 1 << 16)
    sampled = 0
    for file in files:
        from_file = 0
        for record in read_records(file, Part(0), options):
            if record.text:
                yield record.text
                from_file += len(record.text)
            if from_file >= share or sampled + from_file >= max_bytes:
                break
        sampled += from_file


def expected_bytes(files: Sequence[InputFile], max_bytes: int) -> int | None:
    """Bytes of text that `sample_texts` will give. None: unknown, since the files are smaller than `max_bytes`."""
    return max_bytes if sum(file.size or 0 for file in files) >= max_bytes else None


@dataclass
class Sample:
    """The sentences to train on, and their size."""

    sentences: list[str] = field(default_factory=list[str])
    bytes: int = 0
    characters: Counter[str] = field(default_factory=Counter[str])


def read_sample(texts: Iterable[str], max_bytes: int, advance: Advance) -> Sample:
    """The texts as pieces to train on, at most `max_bytes` of them."""
    sample = Sample()
    for text in texts:
        before = sample.bytes
        for sentence in cut_sentences(text.translate(_UNTRAINABLE)):
            if sample.bytes >= max_bytes:
                return sample
            sample.sentences.append(sentence)
            sample.bytes += len(sentence.encode())
            sample.characters.update(sentence)
        advance(sample.bytes - before)
    return sample


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


def _explain(message: str, vocab_size: int, sample: Sample) -> str:
    """SentencePiece's error message in the words of the command line."""
    size = f"{len(sample.sentences):,} pieces, {sample.bytes:,} bytes, {len(sample.characters):,} characters"
    if not sample.bytes:
        return "there is no text to train a tokenizer on; check the inputs and --text-key"
    if high := re.search(r"too high \(\d+\).*<= (\d+)", message):
        return (
            f"a vocabulary of {vocab_size} is too large for this text ({size}); the allowed range is "
            f"{_smallest_vocabulary(sample.characters)} to {high[1]}: lower --vocab-size or give more text"
        )
    if low := re.search(r"smaller than required_chars[^\d]*(\d+) vs (\d+)", message):
        return (
            f"a vocabulary of {vocab_size} is too small for this text ({size}); it must be at least {low[2]} "
            f"(256 bytes, 3 control tokens and the frequent characters): raise --vocab-size"
        )
    return f"SentencePiece could not train a vocabulary of {vocab_size} on this text ({size}): {message}"


def _smallest_vocabulary(characters: Counter[str]) -> int:
    """The smallest vocabulary: every byte, the control tokens, and the characters that make up the coverage."""
    wanted = CHARACTER_COVERAGE * characters.total()
    covered = itertools.accumulate(count for _, count in characters.most_common())
    return _BYTES_AND_CONTROL + 1 + sum(1 for count in covered if count < wanted)
