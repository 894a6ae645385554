"""What a checkpoint holds besides tensors, what a load asks for, and what it returns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallel.engine import CheckpointTensor
from train.checkpoint import rng
from train.model.names import plain_name


@dataclass(frozen=True)
class SavedProgress:
    """How far the run is."""

    step: int
    tokens: int
    validation_loss: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Loaded:
    """What was loaded, besides the tensors."""

    progress: SavedProgress
    path: str
    rank_states: list[dict[str, Any]]
    """Of all ranks of the run that saved."""
    layout: dict[str, Any]
    """Of the run that saved."""
    bytes_read: int
    """By this rank."""
    random: bytes | None = field(repr=False)

    def restore_rng(self) -> bool:
        """Set this rank's random states, last before the first step. False if they belong to another layout."""
        if self.random is not None:
            rng.restore(self.random)
        return self.random is not None


@dataclass(frozen=True)
class Wanted:
    """What is to be filled, and what must fit."""

    state: Mapping[str, CheckpointTensor]
    identity: Mapping[str, Any]
    layout: Mapping[str, Any]
    allow: frozenset[str]
    record: Callable[..., None]


def plain_names(state: Mapping[str, CheckpointTensor]) -> dict[str, CheckpointTensor]:
    """Without the prefixes that wrappers insert, wherever they stand."""
    plain: dict[str, CheckpointTensor] = {}
    for name, tensor in state.items():
        stripped = plain_name(name)
        assert stripped not in plain, f"two tensors are called {stripped}"
        plain[stripped] = tensor
    return plain
