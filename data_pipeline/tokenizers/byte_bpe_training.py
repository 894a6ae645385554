"""Trains a byte-level BPE like GPT-2's. It is lossless: a text is a sequence of bytes, and every byte is a token."""

import json
from collections.abc import Iterable
from pathlib import Path

from data_pipeline.atomic_file import write_together
from data_pipeline.errors import DataError
from data_pipeline.progress import Progress, silent
from data_pipeline.tokenizers.sentencepiece_training import DEFAULT_MAX_BYTES, Trained, read_sample
from data_pipeline.tokenizers.tokenizer import HUGGING_FACE_FILE, KEEPSTEP_FILE

END_OF_DOCUMENT = "<|endoftext|>"
_SMALLEST = 256 + 1


def train_byte_bpe(
    texts: Iterable[str],
    out: Path,
    *,
    vocab_size: int,
    max_bytes: int = DEFAULT_MAX_BYTES,
    expected_bytes: int | None = None,
    progress: Progress = silent,
) -> Trained:
    """Trains on at most `max_bytes` of text and writes `out`/tokenizer.json. The last id ends a document.

    DataError if there is no text or it does not allow `vocab_size` tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < _SMALLEST:
        raise DataError(
            f"a vocabulary of {vocab_size} is too small; a byte-level one has 256 bytes and {END_OF_DOCUMENT}: set "
            f"--vocab-size to {_SMALLEST} or more"
        )
    with progress("reading text", expected_bytes, "bytes") as advance:
        sample = read_sample(texts, max_bytes, advance)
    if not sample.bytes:
        raise DataError("there is no text to train a tokenizer on; check the inputs and --text-key")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
    with progress("training the tokenizer", None, ""):
        tokenizer.train_from_iterator(sample.sentences, trainer)
    tokenizer.add_special_tokens([AddedToken(END_OF_DOCUMENT, special=True)])  # pyright: ignore[reportUnknownMemberType]
    if tokenizer.get_vocab_size() != vocab_size:
        raise DataError(
            f"a vocabulary of {vocab_size} is too large for this text ({sample.bytes:,} bytes); the allowed range is "
            f"{_SMALLEST} to {tokenizer.get_vocab_size()}: lower --vocab-size or give more text"
        )
    config = {"eos_token": END_OF_DOCUMENT, "tokenizer_class": "PreTrainedTokenizerFast"}
    files = {
        HUGGING_FACE_FILE: tokenizer.to_str(pretty=True).encode(),
        KEEPSTEP_FILE: json.dumps({"end_of_document": END_OF_DOCUMENT}).encode() + b"\n",
        "tokenizer_config.json": json.dumps(config).encode() + b"\n",
    }
    write_together(out, files)
    return Trained(out / HUGGING_FACE_FILE, vocab_size, len(sample.sentences), sample.bytes)
