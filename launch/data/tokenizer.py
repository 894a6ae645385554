"""`keepstep data tokenizer`: train a tokenizer of SentencePiece, or a byte-level BPE."""

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from launch.data.reading import add_reading, read_options
from launch.numbers import whole
from launch.output import output_to
from launch.terminal import add_json_option, duration, print_json, progress, size

if TYPE_CHECKING:
    from data_pipeline.tokenizers.sentencepiece_training import Trained


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep data tokenizer`."""
    parser.epilog = "example: keepstep data tokenizer texts/*.jsonl.gz --out data/tokenizer --vocab-size 32000"
    add_reading(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the tokenizer's files")
    parser.add_argument(
        "--vocab-size", type=whole("--vocab-size", 1), default=32_000, metavar="N", help="tokens (default: 32000)"
    )
    parser.add_argument(
        "--kind",
        choices=("bpe", "unigram", "byte-bpe"),
        default="bpe",
        help="bpe or unigram of SentencePiece, or a byte-level BPE like GPT-2's (default: bpe)",
    )
    parser.add_argument(
        "--sample-mib",
        type=whole("--sample-mib", 1, 1_000_000),
        default=256,
        metavar="MIB",
        help="amount of text to train on (default: 256)",
    )
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    """Train the tokenizer and print its size."""
    started = time.monotonic()
    if not options.json:
        kind = "byte-level BPE" if options.kind == "byte-bpe" else "SentencePiece"
        print(f"training a {kind} tokenizer with {options.vocab_size:,} tokens ...", flush=True)
    with output_to(options.out, "no file of the tokenizer was written"):
        trained = _train(options)
    seconds = time.monotonic() - started
    if options.json:
        print_json({**asdict(trained), "file": str(trained.file), "seconds": seconds})
    else:
        print(
            f"{trained.file}: {trained.vocab_size:,} tokens, trained on {size(trained.text_bytes)} of text "
            f"({trained.sentences:,} pieces, none skipped) in {duration(seconds)}"
        )
    return 0


def _train(options: argparse.Namespace) -> "Trained":
    from data_pipeline.build.plan import check_text_keys
    from data_pipeline.build.workers import default_workers
    from data_pipeline.sources.inputs import list_inputs
    from data_pipeline.tokenizers.byte_bpe_training import train_byte_bpe
    from data_pipeline.tokenizers.sentencepiece_training import (
        DEFAULT_MAX_BYTES,
        expected_bytes,
        sample_texts,
        train_sentencepiece,
    )

    files, sample_bytes, reading = list_inputs(options.inputs), options.sample_mib << 20, read_options(options)
    check_text_keys(files, reading)
    texts = sample_texts(files, reading, sample_bytes)
    expected = expected_bytes(files, sample_bytes)
    max_bytes = max(sample_bytes, DEFAULT_MAX_BYTES)  # a small sample is limited by `sample_texts` alone
    if options.kind == "byte-bpe":
        return train_byte_bpe(
            texts,
            options.out,
            vocab_size=options.vocab_size,
            max_bytes=max_bytes,
            expected_bytes=expected,
            progress=progress,
        )
    return train_sentencepiece(
        texts,
        options.out,
        vocab_size=options.vocab_size,
        kind=options.kind,
        max_bytes=max_bytes,
        threads=default_workers(),
        expected_bytes=expected,
        progress=progress,
    )
