"""`keepstep data build`: build a data set from text."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.data.packing import add_packing, open_workers, packing_options
from launch.data.reading import add_reading, read_options
from launch.data.report import print_built
from launch.numbers import number, whole
from launch.output import output_to
from launch.terminal import add_json_option, print_json, progress

if TYPE_CHECKING:
    from data_pipeline.build.options import BuildOptions


class _HeldOutShare(argparse.Action):
    """Accepts the earlier name of `--validation-share`, with a warning."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        print("keepstep: --held-out-share is now --validation-share", file=sys.stderr)
        setattr(namespace, self.dest, values)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep data build`."""
    parser.epilog = "example: keepstep data build texts/*.jsonl.gz --out data/main --tokenizer data/tokenizer"
    add_reading(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the new data set")
    parser.add_argument(
        "--tokenizer", required=True, metavar="DIR", help="folder or file of a tokenizer, or its Hugging Face name"
    )
    parser.add_argument(
        "--end-of-document", metavar="TOKEN", help="control token after each document, if the tokenizer names none"
    )
    parser.add_argument(
        "--beginning-of-document", metavar="TOKEN", help="control token before each document (default: none)"
    )
    add_packing(parser)
    _add_validation(parser)
    _add_cleaning(parser)
    parser.add_argument("--allow-unusable", action="store_true", help="continue although a file has no usable document")
    parser.add_argument(
        "--share",
        metavar="I/N",
        help="tokenize only part I of N, in a job array; the same command without --share finishes the build",
    )
    add_json_option(parser)


def _add_validation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--validation-share",
        type=number("--validation-share", 0, 1),
        default=None,
        metavar="SHARE",
        help="share of the documents for the validation split, chosen by hash (default: 0.005)",
    )
    parser.add_argument(
        "--validation",
        action="append",
        default=[],
        metavar="FILES",
        help="file, folder, glob or address whose documents are the validation split, instead of a share; copies of "
        "them are not trained on; can be given several times",
    )
    parser.add_argument(
        "--held-out-share",
        action=_HeldOutShare,
        dest="validation_share",
        type=number("--held-out-share", 0, 1),
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )


def _add_cleaning(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--deduplicate", action="store_true", help="drop exact copies of documents in the whole input")
    parser.add_argument(
        "--min-characters", type=whole("--min-characters", 0), default=0, metavar="N", help="drop shorter documents"
    )
    parser.add_argument(
        "--max-characters", type=whole("--max-characters", 1), metavar="N", help="drop longer documents"
    )
    parser.add_argument("--quality", action="store_true", help="drop repetitive and broken text, in any language")
    parser.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="your own filter; can be given several times",
    )


def run(options: argparse.Namespace) -> int:
    """Build the data set and print its contents."""
    from data_pipeline.build.prepare import build_dataset

    started = time.monotonic()
    share = parse_share(options.share)
    with open_workers(options.workers) as pool:
        if pool is None:  # an MPI rank whose work is done
            return 0
        with output_to(options.out, "the same command continues the build"):
            manifest = build_dataset(
                options.inputs,
                options.out,
                options.tokenizer,
                build_options(options),
                end_of_document=options.end_of_document,
                beginning_of_document=options.beginning_of_document,
                validation=options.validation,
                allow_unusable=options.allow_unusable,
                pool=pool,
                share=share,
                progress=progress,
            )
    seconds = time.monotonic() - started
    if manifest is not None:
        print_built(str(options.out), manifest, seconds, options.json)
    elif options.json:
        print_json({"path": str(options.out), "share": options.share, "seconds": seconds})
    else:
        print(f"part {options.share} is tokenized; the same command without --share finishes {options.out}")
    return 0


def build_options(options: argparse.Namespace) -> "BuildOptions":
    """Return the options that decide the output."""
    from data_pipeline.build.cleaning import QUALITY
    from data_pipeline.build.options import BuildOptions

    return BuildOptions(
        **packing_options(options),
        validation_share=validation_share(options),
        deduplicate=options.deduplicate,
        read=read_options(options),
        min_characters=options.min_characters,
        max_characters=options.max_characters,
        filters=(QUALITY,) * options.quality + tuple(options.filter),
    )


def validation_share(options: argparse.Namespace) -> float:
    """Return the share of the documents for the validation split. DataError if there are --validation files as well."""
    from data_pipeline.errors import DataError

    share = options.validation_share
    if options.validation:
        if share:
            raise DataError(f"--validation-share ({share}) and --validation exclude each other; give one of them")
        return 0.0
    return 0.005 if share is None else share


def parse_share(text: str | None) -> tuple[int, int] | None:
    """Return I and N of "I/N". DataError if it is anything else."""
    if text is None:
        return None
    from data_pipeline.errors import DataError

    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise DataError(f"--share ({text}) must be I/N with 0 <= I < N, such as 0/64")
    return int(part), int(parts)
