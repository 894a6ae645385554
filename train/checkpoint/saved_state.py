"""What a checkpoint stores besides tensors, what a load asks for, and what it returns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallel.engine import CheckpointTensor
from train.model.names import plain_name


@dataclass(frozen=True)
class SavedProgress:
    """The progress of a run as a checkpoint stores it."""

    step: int
    tokens: int
    validation_loss: float | None = None
    """Nats per token at this step; None if it was not evaluated."""
    extra: dict[str, Any] = field(default_factory=dict)
    """JSON that the training loop stores with its progress."""


@dataclass(frozen=True)
class About:
    """What a run's checkpoints state besides its progress. With it, a checkpoint is complete in itself."""

    identity: dict[str, Any]
    layout: dict[str, Any]
    recipe: dict[str, Any] | None
    """The resolved recipe, as JSON."""
    attachments: Mapping[str, bytes]
    """The tokenizer's files by plain name. Rank 0 writes them."""


@dataclass(frozen=True)
class Loaded:
    """What a load returns besides the tensors, which it fills in place."""

    progress: SavedProgress
    path: str
    rank_states: list[dict[str, Any]]
    """JSON of each rank of the run that saved, in rank order."""
    bytes_read: int
    """Bytes that this rank read."""
    missing: frozenset[str] = frozenset()
    """Names of wanted tensors that the checkpoint does not have."""
    unread: frozenset[str] = frozenset()
    """Names of its tensors that were not wanted."""


@dataclass(frozen=True)
class LoadRequest:
    """The tensors that a load fills, and what the checkpoint must match."""

    state: Mapping[str, CheckpointTensor]
    identity: Mapping[str, Any]
    allow: frozenset[str]
    """Names or sections of `identity` that may differ."""
    record: Callable[..., None]
    """Records an event on rank 0; does nothing on other ranks."""
    touched: set[str] = field(default_factory=set[str])
    """Names of the tensors that a fill has begun to overwrite. A fill that fails leaves them half old, half new."""


def plain_names(state: Mapping[str, CheckpointTensor]) -> dict[str, CheckpointTensor]:
    """The state by plain names, without the prefixes that wrappers insert anywhere in a name."""
    plain: dict[str, CheckpointTensor] = {}
    for name, tensor in state.items():
        stripped = plain_name(name)
        assert stripped not in plain, f"two tensors have the plain name {stripped}"
        plain[stripped] = tensor
    return plain
