"""`keepstep data show`: show the contents of a data set."""

import argparse

from launch.data.report import as_json, print_dataset
from launch.terminal import add_json_option, print_json


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep data show`."""
    parser.epilog = "example: keepstep data show data/main"
    parser.add_argument("dataset", metavar="DIR", help="folder or address of a data set")
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    """Print the contents of the data set, from its manifest."""
    from data_pipeline.shards.dataset import DataSet

    manifest = DataSet(options.dataset).manifest
    if options.json:
        print_json(as_json(options.dataset, manifest))
    else:
        print_dataset(options.dataset, manifest)
    return 0
