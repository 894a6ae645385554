"""What a ladder has measured, its file `ladder.json`, and what follows: the law, the recipe's own loss, a verdict."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from data_pipeline.atomic_file import write_atomic
from data_pipeline.untrusted import read_file
from launch.inspect.run_status import require_run
from launch.sweeps.rungs import parameters_of, tokens_of
from launch.sweeps.runs import Outcome, ending_of
from launch.sweeps.scaling_law import SAME_RATIO, Estimate, Measured, ScalingLaw
from launch.sweeps.sweep_report import loss_of, metric_of
from train.config import Recipe
from train.config_file import load_recipe
from train.errors import ConfigError
from train.health.exhausted import exhaustion_in_one_line, make_folder
from train.run_folder import RunFolder

FILE = "ladder.json"
LARGEST = 1 << 22
"""Bytes of a ladder's file that are read."""


class Rung(BaseModel):
    """One run of a ladder that has finished."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    name: str
    parameters: int = Field(gt=0, lt=1 << 53)
    tokens: int = Field(gt=0, lt=1 << 60)
    loss: float = Field(gt=0)
    """Nats per token, by the ladder's metric."""


class Ladder(BaseModel):
    """The runs of a ladder."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    recipe: str
    metric: Literal["validation_loss", "train_loss"]
    level: float = Field(default=0.95, gt=0, lt=1)
    """Share of runs that lie in the band."""
    rungs: tuple[Rung, ...]

    def law(self) -> ScalingLaw:
        """The scaling law through the runs. ConfigError if none can be fitted."""
        return ScalingLaw([Measured(rung.parameters, rung.tokens, rung.loss) for rung in self.rungs], self.level)

    @property
    def ratios(self) -> list[float]:
        """The different numbers of tokens per parameter, in increasing order."""
        found: list[float] = []
        for ratio in sorted(rung.tokens / rung.parameters for rung in self.rungs):
            if not found or ratio > SAME_RATIO * found[-1]:
                found.append(ratio)
        return found


class Prediction(BaseModel):
    """The loss that a ladder predicts for a recipe."""

    parameters: int
    tokens: int
    """Training tokens that the prediction is for."""
    loss: float
    low: float
    high: float
    is_own_length: bool
    """Whether the recipe trains on that many tokens itself."""


def ladder_folder(recipe: Recipe) -> Path:
    """The folder of the ladder's file and plots, beside its runs."""
    return Path(recipe.runs_dir) / f"{recipe.name}-ladder"


def ladder_of(recipe: Recipe, outcomes: Sequence[Outcome]) -> Ladder:
    """The ladder of the runs that have finished."""
    metric = metric_of(outcomes)
    rungs = [
        Rung(
            name=outcome.run.recipe.name,
            parameters=parameters_of(outcome.run.recipe.model),
            tokens=tokens_of(outcome.run.recipe),
            loss=loss,
        )
        for outcome in outcomes
        if (loss := loss_of(outcome.ending, metric)) is not None
    ]
    return Ladder(recipe=recipe.name, metric=metric, rungs=tuple(rungs))  # pyright: ignore[reportArgumentType]


def predict(ladder: Ladder, law: ScalingLaw, recipe: Recipe) -> Prediction:
    """The loss of the recipe's own model, on its own tokens, or at the ladder's D / N if the law holds there alone."""
    parameters, own = parameters_of(recipe.model), tokens_of(recipe)
    is_own = law.with_tokens or is_near(own / parameters, ladder.ratios[0])
    tokens = own if is_own else round(ladder.ratios[0] * parameters)
    found = law.predict(parameters, tokens)
    return Prediction(
        parameters=parameters, tokens=tokens, loss=found.value, low=found.low, high=found.high, is_own_length=is_own
    )


def is_near(ratio: float, other: float) -> bool:
    """Whether two numbers of tokens per parameter count as one."""
    return 1 / SAME_RATIO <= ratio / other <= SAME_RATIO


def document(ladder: Ladder, law: ScalingLaw, prediction: Prediction) -> dict[str, Any]:
    """What `ladder.json` holds, and what `keepstep ladder --json` prints."""
    constants = {name: vars(found) for name, found in law.constants().items()}
    return {
        **ladder.model_dump(mode="json"),
        "law": constants | {"sigma": law.sigma, "with_tokens": law.with_tokens},
        "prediction": prediction.model_dump(mode="json"),
    }


def write(folder: Path, files: dict[str, bytes]) -> None:
    """Write the files of a ladder. ConfigError or ExhaustedError in one line if that fails."""
    make_folder(folder)
    with exhaustion_in_one_line(folder):
        for name, content in files.items():
            write_atomic(folder / name, content)


def read(recipe: Recipe) -> Ladder:
    """The ladder of a recipe. ConfigError if there is none, or if its file cannot be read as one."""
    file = ladder_folder(recipe) / FILE
    try:
        return Ladder.model_validate_json(read_file(file, limit=LARGEST))
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist; train the ladder first: the same command without --check") from None
    except (OSError, ValidationError) as error:
        problem = str(error).splitlines()[0]
        raise ConfigError(
            f"{file} is no ladder ({problem}); write it again: the same command without --check"
        ) from None


@dataclass(frozen=True)
class Verdict:
    """A run's loss beside what its ladder predicts."""

    run: str
    loss: float
    band: Estimate

    @property
    def inside(self) -> bool:
        """Whether the loss lies in the band."""
        return self.band.holds(self.loss)


def check(ladder: Ladder, path: Path) -> Verdict:
    """Compare a finished run with the band of its size. ConfigError if they do not compare."""
    require_run(path)
    folder = RunFolder(path)
    recipe, ending = load_recipe(folder.recipe), ending_of(folder)
    if ending.state != "finished":
        raise ConfigError(f"{path} is {ending.state}, and a ladder predicts the loss of finished runs; let it finish")
    if (loss := loss_of(ending, ladder.metric)) is None:
        raise ConfigError(f"{path} has no {ladder.metric}, which the ladder measured; set train.eval_sequences above 0")
    parameters, tokens, law = parameters_of(recipe.model), tokens_of(recipe), ladder.law()
    if not law.with_tokens and not is_near(tokens / parameters, ladder.ratios[0]):
        raise ConfigError(
            f"{path} has {tokens / parameters:.4g} tokens per parameter and the ladder {ladder.ratios[0]:.4g}, so they "
            "do not compare; train the ladder with --tokens-per-parameter of the run, or with two values"
        )
    return Verdict(str(path), loss, law.predict(parameters, tokens))
