"""`keepstep data`: tokenizer, build, show, repack, audit and trace."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from launch.data.trace import add_audit, add_trace, audit_run, trace_run

if TYPE_CHECKING:
    from data_pipeline.build.prepare import BuildOptions, Progress
    from data_pipeline.build.workers import Pool
    from data_pipeline.sources.records import ReadOptions


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (summary, add, _) in _ACTIONS.items():
        add(actions.add_parser(name, help=summary, description=summary))


def run(options: argparse.Namespace) -> int:
    return _ACTIONS[options.action][2](options)


def _add_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="file, folder, glob, address (s3://, gs://, https://) or hf:NAME[@CONFIG][:SPLIT]; jsonl, parquet or "
        "text, plain or compressed (gzip, zstd, xz)",
    )
    parser.add_argument("--format", choices=("auto", "jsonl", "parquet", "text"), default="auto")
    parser.add_argument("--text-key", default="text", metavar="KEY", help="of jsonl and parquet (default: text)")
    parser.add_argument(
        "--separator", metavar="TEXT", help=r"between documents of a text file, such as '\n' (default: one a file)"
    )
    parser.add_argument(
        "--on-error", choices=("strict", "replace"), default="strict", help="text that is not UTF-8: stop, or mend it"
    )
    parser.add_argument(
        "--max-document-mib", type=int, default=32, metavar="MIB", help="longer documents are dropped (default: 32)"
    )


def _reading(options: argparse.Namespace) -> "ReadOptions":
    from data_pipeline.sources.records import ReadOptions

    separator = options.separator
    if separator is not None:
        separator = separator.replace(r"\n", "\n").replace(r"\t", "\t")
    return ReadOptions(
        options.format, options.text_key, separator or None, options.on_error, options.max_document_mib << 20
    )


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    _add_reading(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the tokenizer's files")
    parser.add_argument("--vocab-size", type=int, default=32_000, metavar="N", help="tokens (default: 32000)")
    parser.add_argument("--kind", choices=("bpe", "unigram"), default="bpe")
    parser.add_argument("--sample-mib", type=int, default=256, metavar="MIB", help="text to train on (default: 256)")


def _tokenizer(options: argparse.Namespace) -> int:
    from data_pipeline.build.workers import default_workers
    from data_pipeline.tokenizers.sentencepiece_training import sample_texts, train_sentencepiece

    started = time.monotonic()
    print(f"training a SentencePiece tokenizer of {options.vocab_size} tokens ...", flush=True)
    texts = sample_texts(options.inputs, _reading(options), options.sample_mib << 20)
    trained = train_sentencepiece(
        texts, options.out, vocab_size=options.vocab_size, kind=options.kind, threads=default_workers()
    )
    print(
        f"{trained.file}: {trained.vocab_size} tokens from {trained.text_bytes / 1e6:.1f} MB of text "
        f"({trained.sentences} pieces, none skipped) in {time.monotonic() - started:.1f} s"
    )
    return 0


def _add_build(parser: argparse.ArgumentParser) -> None:
    _add_reading(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the data set, written whole or not")
    parser.add_argument("--tokenizer", required=True, metavar="DIR", help="its folder, file, or Hugging Face name")
    parser.add_argument("--end-of-document", metavar="TOKEN", help="if the tokenizer's files do not name it")
    _add_packing(parser)
    parser.add_argument(
        "--validation-share", type=float, default=0.005, metavar="SHARE", help="of documents, by hash (default: 0.005)"
    )
    parser.add_argument("--deduplicate", action="store_true", help="drop exact copies over the whole input")
    parser.add_argument("--min-characters", type=int, default=0, metavar="N", help="drop shorter documents")
    parser.add_argument("--max-characters", type=int, metavar="N", help="drop longer documents")
    parser.add_argument("--quality", action="store_true", help="drop repetitive and broken text in any language")
    parser.add_argument("--filter", action="append", default=[], metavar="MODULE:FUNCTION", help="your own filter")
    parser.add_argument(
        "--share", metavar="I/N", help="only tokenize part I of N (a job array); the plain command ends"
    )


def _add_packing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seq-len", type=int, default=1024, metavar="N", help="tokens in a row (default: 1024)")
    parser.add_argument("--packing", choices=("best-fit", "concatenate"), default="best-fit")
    parser.add_argument("--compress", action="store_true", help="zstd for the shards")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one for each CPU)")


def _build_options(options: argparse.Namespace) -> "BuildOptions":
    from data_pipeline.build.cleaning import QUALITY
    from data_pipeline.build.prepare import BuildOptions

    return BuildOptions(
        seq_len=options.seq_len,
        packing=options.packing,
        compression="zstd" if options.compress else "none",
        validation_share=options.validation_share,
        deduplicate=options.deduplicate,
        read=_reading(options),
        min_characters=options.min_characters,
        max_characters=options.max_characters,
        filters=(QUALITY,) * options.quality + tuple(options.filter),
    )


def _build(options: argparse.Namespace) -> int:
    from data_pipeline.build.prepare import build_dataset

    arguments = (options.inputs, options.out, options.tokenizer, _build_options(options))
    share = _parse_share(options.share)
    with _open_pool(options.workers) as pool:
        if pool is None:  # an MPI rank that did its part
            return 0
        manifest = build_dataset(
            *arguments, end_of_document=options.end_of_document, pool=pool, share=share, report=_progress()
        )
    if manifest is None:
        print(f"part {options.share} is done; the same command without --share finishes {options.out}")
        return 0
    return _show(argparse.Namespace(dataset=str(options.out), json=False))


def _open_pool(workers: int | None) -> "AbstractContextManager[Pool | None]":
    """MPI ranks under mpirun, else processes."""
    from data_pipeline.build.workers import default_workers, open_mpi_pool, open_pool, under_mpi

    return open_mpi_pool() if under_mpi(os.environ) else open_pool(workers or default_workers())


def _parse_share(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    from data_pipeline.errors import DataError

    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise DataError(f"--share ({text}) must be I/N with 0 <= I < N, such as 0/64")
    return int(part), int(parts)


def _progress() -> "Callable[[Progress], None]":
    """Rewrites one line on a terminal; whole lines, not too many, in a log."""
    last = [0.0]
    terminal = sys.stderr.isatty()

    def report(progress: "Progress") -> None:
        now = time.monotonic()
        ended = progress.done == progress.total
        if not ended and now - last[0] < (0.2 if terminal else 10):
            return
        last[0] = now
        line = progress_line(progress)
        print(f"\r{line:<100}" if terminal else line, end="\n" if ended or not terminal else "", file=sys.stderr)

    return report


def progress_line(progress: "Progress") -> str:
    seconds = max(progress.seconds, 1e-9)
    parts = [f"{progress.stage} {progress.done}/{progress.total}"]
    if progress.documents:
        parts.append(f"{progress.documents / seconds:,.0f} documents/s")
    parts += [f"{progress.bytes / seconds / 1e6:.1f} MB/s", f"{progress.tokens / seconds:,.0f} tokens/s"]
    if progress.seconds_left is not None:
        parts.append(f"{progress.seconds_left:.0f} s left")
    return ", ".join(parts)


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", metavar="DIR", help="folder or address of a data set")
    parser.add_argument("--json", action="store_true", help="the manifest and its fingerprint as JSON")


def _show(options: argparse.Namespace) -> int:
    from data_pipeline.shards.dataset import DataSet
    from launch.data.report import as_json, as_text

    manifest = DataSet(options.dataset).manifest
    print(json.dumps(as_json(manifest)) if options.json else as_text(options.dataset, manifest))
    return 0


def _add_repack(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", metavar="DIR", help="folder or address of a data set")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the new data set")
    _add_packing(parser)


def _repack(options: argparse.Namespace) -> int:
    from data_pipeline.build.prepare import BuildOptions
    from data_pipeline.build.repack import repack_dataset

    packing = BuildOptions(
        seq_len=options.seq_len, packing=options.packing, compression="zstd" if options.compress else "none"
    )
    with _open_pool(options.workers) as pool:
        if pool is None:
            return 0
        repack_dataset(options.dataset, options.out, packing, pool, _progress())
    return _show(argparse.Namespace(dataset=str(options.out), json=False))


_Action = tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]

_ACTIONS: dict[str, _Action] = {
    "tokenizer": ("train a SentencePiece tokenizer", _add_tokenizer, _tokenizer),
    "build": ("make a data set of text", _add_build, _build),
    "show": ("print what a data set holds", _add_show, _show),
    "repack": ("make a data set anew for another row length, without tokenizing", _add_repack, _repack),
    "audit": ("prove that every row is read as often as planned", add_audit, audit_run),
    "trace": ("print the documents that a step trained on", add_trace, trace_run),
}
