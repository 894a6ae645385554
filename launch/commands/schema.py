"""`keepstep schema`: print the JSON schema of recipes, with which editors complete and check them."""

import argparse

from train.config_file import recipe_schema


def configure(parser: argparse.ArgumentParser) -> None:
    """Add an example; the command has no arguments."""
    parser.epilog = "example: keepstep schema > recipe.schema.json"


def run(options: argparse.Namespace) -> int:
    """Print the schema."""
    print(recipe_schema())
    return 0
