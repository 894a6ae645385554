"""Which prepared data sets a run reads, and how."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class SourceConfig(BaseModel):
    """One prepared data set and its share of the samples."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    path: str
    """Folder or address that `keepstep data build` wrote (local path, s3://, https://, ...)."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the samples, relative to the other sources."""
    mirror: str | None = None
    """A second address of the same data set, tried when a read of the first fails."""


class WeightChange(BaseModel):
    """Other weights of the sources from a step on."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    step: int = Field(gt=0)
    """First optimizer step (counted from 0) with these weights."""
    weights: tuple[float, ...]
    """One for each source; all above 0."""


class DataConfig(BaseModel):
    """The training data."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    """Data sets mixed by weight."""
    weight_changes: tuple[WeightChange, ...] = ()
    """Planned changes of the weights, by step. Changing a weight between two starts of a run works as well."""
    seed: int = Field(default=1, ge=0)
    """Of the order of samples."""
    prefetch_batches: int = Field(default=32, ge=0)
    """Micro batches read ahead by a thread; 0 reads in the loop."""
    cache_gib: float = Field(default=8.0, gt=0)
    """Most bytes kept locally of data that lies in an object store."""
    on_bad_block: Literal["stop", "quarantine"] = "stop"
    """A block that stays unreadable or damaged: stop the run, or replace it by the next good one and record that."""

    @model_validator(mode="after")
    def _changes_fit(self) -> "DataConfig":
        steps = [change.step for change in self.weight_changes]
        if steps != sorted(set(steps)):
            raise ValueError(f"weight_changes must come in the order of their steps, each step once, not {steps}")
        for change in self.weight_changes:
            if len(change.weights) != len(self.sources) or min(change.weights) <= 0:
                raise ValueError(
                    f"weight_changes at step {change.step} needs one weight above 0 for each of the "
                    f"{len(self.sources)} sources, not {list(change.weights)}"
                )
        return self
