"""Where an import saves: the folder of checkpoints, its run, and whether a run there would start from the import."""

from collections.abc import Iterator
from pathlib import Path

from data_pipeline.config import expand_path
from train.checkpoint.stores.open import open_root
from train.checkpoint.stores.steps import committed_steps
from train.config import Recipe
from train.config_file import load_recipe
from train.errors import CheckpointError, ConfigError
from train.run_folder import RunFolder


def places(target: str) -> tuple[str, Path | None]:
    """The folder of checkpoints at `target`, and the local run folder that it belongs to; None for other places."""
    target = target.rstrip("/")
    name = target.rpartition("/")[2]
    if name != "checkpoints" and open_root(target).steps():  # a folder of checkpoints outside of a run
        return target, None
    checkpoints = target if name == "checkpoints" else f"{target}/checkpoints"
    return checkpoints, None if "://" in target else Path(checkpoints).absolute().parent


def check_steps(checkpoints: str, run: Path | None, recipe: Recipe, step: int) -> None:
    """CheckpointError if a run in this folder would resume from another checkpoint than the imported one.

    Looks into the shared tier, and into what this machine sees of the run's fast tier."""
    newest = {checkpoints: max(open_root(checkpoints).steps(), default=-1)}
    if run is not None:
        for folder in _fast_tiers(checkpoints, run, recipe):
            newest[f"{folder} (checkpoint.local_dir)"] = max(committed_steps(folder), default=-1)
    for place, later in newest.items():
        if later >= step:
            raise CheckpointError(
                f"{place} has a checkpoint of step {later}, but the imported one has step {step}, so the "
                "run would not start from it; import into the folder of a new run"
            )


def _fast_tiers(checkpoints: str, run: Path, recipe: Recipe) -> Iterator[Path]:
    """The folders on this machine in which a start of the run, by either recipe, would look for its fast tier."""
    from train.checkpoint.local_tier import run_name  # imports DCP, which takes half a second

    recipes = [recipe, *_recipe_of(run)]
    for local_dir in {one.checkpoint.local_dir for one in recipes if one.checkpoint.local_dir is not None}:
        try:
            yield Path(expand_path(local_dir)) / run_name(checkpoints)
        except ValueError as error:
            raise ConfigError(f"checkpoint.local_dir: {error}") from None


def _recipe_of(run: Path) -> list[Recipe]:
    """The recipe of the run's last start, if there was one."""
    path = RunFolder(run).recipe
    return [load_recipe(path)] if path.is_file() else []
