"""`keepstep data repack`: build a data set again with another row length, without tokenizing."""

import argparse
import time
from pathlib import Path

from launch.data.packing import add_packing, open_workers, packing_options
from launch.data.report import print_built
from launch.output import output_to
from launch.terminal import add_json_option, progress


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep data repack`."""
    parser.epilog = "example: keepstep data repack data/main --out data/main-8k --seq-len 8192"
    parser.add_argument("dataset", metavar="DIR", help="folder or address of a data set")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the new data set")
    add_packing(parser)
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    """Build the new data set and print its contents."""
    from data_pipeline.build.options import BuildOptions
    from data_pipeline.build.repack import repack_dataset

    started = time.monotonic()
    with open_workers(options.workers) as pool:
        if pool is None:  # an MPI rank whose work is done
            return 0
        packing = BuildOptions(**packing_options(options))
        with output_to(options.out, "the same command continues"):
            manifest = repack_dataset(options.dataset, options.out, packing, pool, progress)
    print_built(str(options.out), manifest, time.monotonic() - started, options.json)
    return 0
