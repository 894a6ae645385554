"""Which prepared data sets a run reads, and how."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class SourceConfig(BaseModel):
    """One prepared data set and its share of the samples."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    path: str
    """Folder or address that `keepstep data build` wrote (local path, s3://, https://, ...)."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the samples, relative to the other sources."""
    mirror: str | None = None
    """A second address of the same data set, tried when a read of the first fails."""


class DataConfig(BaseModel):
    """The training data."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    """Data sets mixed by weight."""
    seed: int = Field(default=1, ge=0)
    """Of the order of samples."""
    prefetch_batches: int = Field(default=4, ge=0)
    """Micro batches read ahead by a thread; 0 reads in the loop."""
    cache_gib: float = Field(default=8.0, gt=0)
    """Most bytes kept locally of data that lies in an object store."""
    on_bad_block: Literal["stop", "quarantine"] = "stop"
    """A block that stays unreadable or damaged: stop the run, or replace it by the next good one and record that."""
