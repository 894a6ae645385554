"""Settings of the training data: which prepared data sets a run reads, their weights, and how they are read."""

import os
import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from data_pipeline.credentials import check_address, expand_outside_credentials

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")


def check_one_line(text: str) -> str:
    """The text. ValueError if it has line breaks or control characters, or is no Unicode text."""
    if found := _CONTROL.search(text):
        raise ValueError(
            f"{text[:200]!r} has the character {found[0]!r}; write it as one line without control characters"
        )
    return text


def expand_path(path: str) -> str:
    """The path with a leading `~` and environment variables such as `$SCRATCH` replaced.

    Variables in place of passwords in an address stay (`data_pipeline.credentials`). ValueError for a password itself,
    for a variable that is not set, and for control characters."""

    def expand(text: str) -> str:
        expanded = os.path.expandvars(text)
        if unset := _VARIABLE.search(expanded):
            raise ValueError(f"the variable {unset[0]} in {path!r} is not set; set it, or write the path out")
        return expanded

    expanded = check_one_line(expand_outside_credentials(check_address(path), expand))
    if not expanded.startswith("~"):
        return expanded
    try:
        return str(Path(expanded).expanduser())
    except RuntimeError:
        raise ValueError(f"{path!r} names no home folder that this machine knows; write the path out") from None


ExpandedPath = Annotated[str, AfterValidator(expand_path)]
"""A path or address in a recipe, with `~` and `$NAME` replaced when the recipe is read."""


class SourceConfig(BaseModel):
    """One prepared data set and its share of the samples."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    path: ExpandedPath
    """Folder or address that `keepstep data build` wrote (local path, s3://, https://, ...)."""
    weight: float = Field(default=1.0, ge=0)
    """Share of the samples, relative to the weights of the other sources. 0: no samples; the data set must exist."""
    mirror: ExpandedPath | None = None
    """Second address of the same data set, read when a read from `path` fails."""


class WeightChange(BaseModel):
    """New weights of the sources, used from one step onwards."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    step: int = Field(gt=0)
    """First optimizer step (counted from 0) with these weights."""
    weights: tuple[float, ...]
    """One weight for each source, 0 or above."""


class _Change(BaseModel):
    """A change of a schedule of `train`, at a step or at a number of tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    schedule: ClassVar[str]
    """Name of the setting."""
    step: int | None = Field(default=None, ge=0, le=1 << 40)
    """First optimizer step (counted from 0) after the change. Skipped batches count as steps."""
    tokens: float | None = Field(default=None, gt=0, le=1e18)
    """In place of `step`: the change comes as soon as the batches before it have this many tokens."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        """Each change needs either `step` or `tokens`."""
        if (self.step is None) == (self.tokens is None):
            raise ValueError(
                f"each change of train.{self.schedule} needs either step ({self.step}) or tokens ({self.tokens})"
            )
        return self


class BatchSizeChange(_Change):
    """A new global batch size, used from one step onwards."""

    schedule = "batch_schedule"
    step: int | None = Field(default=None, gt=0, le=1 << 40)
    """First optimizer step (counted from 0) with this size. Skipped batches count as steps."""
    global_batch_size: int = Field(gt=0, le=1 << 31)
    """Sequences per optimizer step, summed over all ranks."""


class SeqLenChange(_Change):
    """Another length of the rows that the model gets, used from one step onwards."""

    schedule = "seq_len_schedule"
    seq_len: int = Field(gt=0)
    """Tokens of a row, a divisor of `model.seq_len`."""


class DataConfig(BaseModel):
    """The training data of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    """Data sets, mixed by weight. Between two starts of a run, new ones may be added at the end."""
    weight_changes: tuple[WeightChange, ...] = ()
    """Planned changes of the weights, in order of step. You can also edit `weight` between two starts of a run."""
    seed: int = Field(default=1, ge=0)
    """Seed of the order of samples."""
    prefetch_batches: int = Field(default=32, ge=0)
    """Micro batches that a thread reads ahead; 0: the training loop reads them itself."""
    cache_gib: float = Field(default=8.0, gt=0)
    """Memory limit, per rank, for cached blocks of data sets that are remote or compressed."""
    on_bad_block: Literal["stop", "quarantine"] = "stop"
    """Action when a block stays unreadable or damaged: stop the run, or replace the block by the next good one and
    record that."""

    @model_validator(mode="after")
    def _changes_fit(self) -> "DataConfig":
        """`weight_changes` must be in order of step. Each needs one weight for every source, 0 or above. One source at
        least must have a weight above 0."""
        steps = [change.step for change in self.weight_changes]
        if steps != sorted(set(steps)):
            raise ValueError(f"weight_changes must be in order of step, each step once, not {steps}")
        for change in self.weight_changes:
            if len(change.weights) != len(self.sources) or min(change.weights) < 0 or not any(change.weights):
                raise ValueError(
                    f"weight_changes at step {change.step} needs one weight for each of the {len(self.sources)} "
                    f"sources, 0 or above and not all 0, not {list(change.weights)}"
                )
        if not any(source.weight for source in self.sources):
            raise ValueError("the weight of all sources is 0; give at least one of them a weight above 0")
        return self
