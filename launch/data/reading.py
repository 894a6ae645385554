"""Arguments about input text, which `tokenizer` and `build` share."""

import argparse
import re
from typing import TYPE_CHECKING

from launch.numbers import whole

if TYPE_CHECKING:
    from data_pipeline.sources.records import ReadOptions


def add_reading(parser: argparse.ArgumentParser) -> None:
    """Add the inputs, and the options for reading them."""
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="file, folder, glob, address (s3://, gs://, https://) or hf:NAME[@CONFIG][:SPLIT]; jsonl, parquet or "
        "text, plain or compressed (gzip, zstd, xz)",
    )
    parser.add_argument(
        "--format",
        choices=("auto", "jsonl", "parquet", "text"),
        default="auto",
        help="default: detected by name and content",
    )
    parser.add_argument(
        "--text-key",
        action="append",
        default=[],
        metavar="[FILES=]KEY",
        help="key in jsonl, or column in parquet; dots lead into objects and lists: meta.text (default: text). With "
        "FILES, a file, folder or glob, only for these; can be given several times",
    )
    parser.add_argument(
        "--separator",
        metavar="TEXT",
        help=r"string between the documents of a text file, such as '\n\n', with the escapes \n \r \t \f \0 \\ \xHH "
        r"\uHHHH (default: one document per file)",
    )
    parser.add_argument(
        "--keep-cr", action="store_true", help="keep the CR of CRLF line ends in text files (default: read as LF)"
    )
    parser.add_argument(
        "--on-error",
        choices=("strict", "replace"),
        default="strict",
        help="text that is not UTF-8: stop, or replace invalid characters by U+FFFD (default: strict)",
    )
    parser.add_argument(
        "--max-document-mib",
        type=whole("--max-document-mib", 1, 1_000_000),
        default=32,
        metavar="MIB",
        help="drop longer documents (default: 32)",
    )


def read_options(options: argparse.Namespace) -> "ReadOptions":
    """Return the options that `add_reading` added."""
    from data_pipeline.errors import DataError
    from data_pipeline.sources.records import ReadOptions

    if options.separator == "":
        raise DataError("--separator must not be empty; leave it out for one document per file")
    patterns = [key.rpartition("=") for key in options.text_key]
    keys = [key for _, equals, key in patterns if not equals]
    if len(keys) > 1:
        raise DataError(
            f"--text-key is given {len(keys)} times ({', '.join(keys)}); give one for all files, and FILES=KEY for some"
        )
    return ReadOptions(
        format=options.format,
        text_key=keys[0] if keys else "text",
        text_keys=tuple((files, key) for files, equals, key in patterns if equals),
        separator=None if options.separator is None else unescape(options.separator),
        keep_carriage_returns=options.keep_cr,
        on_error=options.on_error,
        max_document_bytes=options.max_document_mib << 20,
    )


_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0", "\\": "\\"}
_ESCAPE = re.compile(r"\\(?:([nrtfv0\\])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4}))")


def unescape(text: str) -> str:
    """Return the text with its backslash escapes replaced by the characters that they name."""
    return _ESCAPE.sub(lambda found: _ESCAPES[found[1]] if found[1] else chr(int(found[2] or found[3], 16)), text)
