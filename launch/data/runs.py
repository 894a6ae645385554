"""Opens a run for `audit` and `trace`: its recipe, and the data state of its newest checkpoint."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.config import Recipe


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names the run."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, or a recipe that has not run")


def open_run(path: Path) -> tuple["Recipe", list[dict[str, Any]]]:
    """Return the recipe, and the states of all ranks in the newest checkpoint, or none if there is no checkpoint."""
    from data_pipeline.stream.saved_state import check_states
    from train.checkpoint.format.verify import read_manifest
    from train.checkpoint.stores.open import open_root
    from train.config_file import load_recipe
    from train.run_folder import RunFolder

    if path.is_file():
        return load_recipe(path), []
    folder = RunFolder(path)
    recipe = load_recipe(folder.recipe)
    root = open_root(folder.checkpoints)
    if not (steps := root.steps()):
        return recipe, []
    manifest, _ = read_manifest(root.folder(steps[-1]))
    if "imported" in manifest.extra:  # it has no state of the data
        return recipe, []
    check_states(manifest.rank_states)
    return recipe, manifest.rank_states
