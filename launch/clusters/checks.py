"""Mistakes that `keepstep submit` and `keepstep kubernetes` find before a job waits in a queue for hours."""

from pathlib import Path

from parallel.errors import LaunchError
from parallel.layout import resolve_layout
from train.config import Recipe
from train.errors import ConfigError


def check_ranks(recipe: Recipe, ranks: int, nodes: range) -> None:
    """Raise LaunchError if the recipe does not fit the ranks of any number of nodes that may be given.

    `ranks`: processes a node."""
    for count in nodes:
        try:
            layout = resolve_layout(recipe.parallel, count * ranks)
            recipe.grad_accum_steps(layout.data_parallel_size)
        except (ConfigError, LaunchError) as error:
            possible = "" if len(nodes) == 1 else f", which --min-nodes {nodes[0]} --nodes {nodes[-1]} allows,"
            raise LaunchError(
                f"{count * ranks} ranks ({count} nodes x {ranks}){possible} do not fit the recipe: {error}"
            ) from None


def check_data(recipe: Recipe) -> None:
    """Raise LaunchError if a data set of the recipe is a folder that does not exist on this machine."""
    for number, source in enumerate(recipe.data.sources):
        if "://" not in str(source.path) and not Path(source.path).is_dir():
            raise LaunchError(
                f"data.sources.{number}.path ({source.path}) does not exist on this machine; build the data set first "
                "(`keepstep data build`), or add --skip-data-check if only the nodes see it"
            )
