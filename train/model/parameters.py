"""What is known about a parameter before the model is built: its shape, its kind and its initial values.

Each module class has a static method `declare(config)` that returns its parameters by name, relative to the module.
Counts, FLOP, initial values, weight decay and the choice between Muon and AdamW all follow from these declarations.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from train.model.config import ModelConfig
from train.model.mup import matrix_std

T = TypeVar("T")


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model, declared without building it."""

    shape: tuple[int, ...]
    kind: Literal["matrix", "table", "gain", "bias"]
    """matrix: decays, and Muon may update it. table (embeddings, head): decays only with `optim.decay_embeddings`.
    gain: starts at 1 and never decays. bias: starts at 0 and never decays."""
    std: float = 0.0
    """Standard deviation of the initial values around their start."""
    multiplied: float = 1.0
    """Share of the parameter that one token is multiplied by: 0 for a lookup, 1 for a linear layer."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def linear(rows: int, columns: int, *, std: float, bias: bool) -> dict[str, Parameter]:
    """The parameters of `nn.Linear(columns, rows, bias)`."""
    weight = {"weight": Parameter((rows, columns), "matrix", std)}
    return {**weight, "bias": Parameter((rows,), "bias")} if bias else weight


def residual_std(config: ModelConfig) -> float:
    """Initial standard deviation of a matrix whose product is added to the residual stream.

    GPT-2 (Radford et al. 2019, section 2.3): each of the 2 n_layers sums adds to the variance of the stream."""
    return matrix_std(config) / math.sqrt(2 * config.n_layers)


def under(prefix: str, entries: Mapping[str, T]) -> dict[str, T]:
    """The entries with `prefix.` before each name."""
    return {f"{prefix}.{name}": entry for name, entry in entries.items()}
