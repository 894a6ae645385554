"""Opens the sinks that a recipe names."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from train.config import Recipe, SinkName
from train.errors import ConfigError
from train.run_folder import RunFolder
from train.sinks.background import BackgroundSink, Sinks
from train.sinks.resumable import SinkState, history
from train.sinks.sink import Sink, settings_of

LIBRARIES: dict[SinkName, tuple[str, ...]] = {
    "tensorboard": ("torch.utils.tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "prometheus": (),
}
"""Modules that a sink imports. Those of `wandb` and `mlflow` come with the extra of the same name."""


def check_sinks(recipe: Recipe) -> None:
    """Raise ConfigError if the library of a sink is not installed. Imports nothing."""
    for name in recipe.train.sinks:
        if any(find_spec(library) is None for library in LIBRARIES[name]):
            raise ConfigError(
                f"train.sinks ({', '.join(recipe.train.sinks)}) needs {name}, which is not installed; "
                f"`pip install 'keepstep[{name}]'`, or remove it from train.sinks"
            )


def open_sinks(recipe: Recipe, first_step: int) -> Sinks:
    """Return the sinks of the recipe. Each starts with its first record; `first_step` is that of this attempt."""
    folder = RunFolder.of(recipe)

    def earlier(step: int) -> list[tuple[int, dict[str, float]]]:
        return history(folder.metrics, step, first_step)

    return Sinks(
        [
            BackgroundSink(name, LIBRARIES[name], _builder(name, recipe, folder, first_step), earlier)
            for name in recipe.train.sinks
        ]
    )


def _builder(name: SinkName, recipe: Recipe, folder: RunFolder, first_step: int) -> Callable[[], Sink]:
    """Return what builds a sink, with its library, in the sink's thread."""
    settings = settings_of(recipe.model_dump(mode="json"))

    def build() -> Sink:
        folder.sinks.mkdir(parents=True, exist_ok=True)
        state = SinkState(folder.sinks / f"{name}.json")
        match name:
            case "tensorboard":
                from train.sinks.tensorboard_sink import TensorBoardSink

                return TensorBoardSink(folder.tensorboard, state, first_step, settings)
            case "wandb":
                from train.sinks.wandb_sink import WandbSink

                return WandbSink(folder.sinks, state, recipe.name, settings)
            case "mlflow":
                from train.sinks.mlflow_sink import MlflowSink

                return MlflowSink(folder.sinks, state, recipe.name, settings)
            case "prometheus":
                from train.sinks.prometheus_sink import PrometheusSink

                return PrometheusSink(Path(recipe.train.prometheus_dir or folder.sinks), recipe.name)

    return build
