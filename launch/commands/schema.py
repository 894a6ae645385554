"""`keepstep schema`: the JSON schema of recipes, so that editors complete and check them."""

import argparse

from train.config_file import recipe_schema


def configure(parser: argparse.ArgumentParser) -> None:
    """It takes no arguments."""


def run(options: argparse.Namespace) -> int:
    print(recipe_schema())
    return 0
