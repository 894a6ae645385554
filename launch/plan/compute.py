"""Time of a rank's own computation: matrix products, attention, and what is bound by memory.

A product of N tokens runs at `best x share x N / (N + half_tokens)`: short products fill the matrix units less (the
share and `half_tokens` are fitted, see `constants.py`). Elementwise work takes as long as its reads and writes.
"""

from dataclasses import dataclass

from launch.plan.constants import Constants
from launch.plan.machine import Machine
from launch.plan.shapes import Arrangement, ModelShape

ELEMENT = 2
"""Bytes of an activation in 16-bit precision."""
REACHED = 0.85
"""Share of the memory's bandwidth that large copies reach."""


@dataclass(frozen=True)
class Computation:
    """Seconds of one micro batch on one rank, forward and backward."""

    products: float
    attention: float
    elementwise: float
    launches: float
    recomputation: float
    head: float
    """Products and softmax of the output head; shared by all pipeline stages, as if the split were even."""

    @property
    def total(self) -> float:
        """All together."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class _Forward:
    """Seconds of a forward pass of all blocks of one rank."""

    products: float
    attention: float
    elementwise: float
    launches: float

    @property
    def total(self) -> float:
        return self.products + self.attention + self.elementwise + self.launches


def computation_seconds(
    model: ModelShape, arrangement: Arrangement, machine: Machine, constants: Constants
) -> Computation:
    """Time of one micro batch. The backward pass takes twice the forward pass, and recomputes what is not kept."""
    forward = _forward(model, arrangement, machine, constants)
    again = {
        "none": 0.0,
        "attention": forward.attention,
        "selective": forward.elementwise + forward.launches,
        "full": forward.total,
    }[arrangement.recomputation]
    return Computation(
        products=3 * forward.products,
        attention=3 * forward.attention,
        elementwise=3 * forward.elementwise,
        launches=3 * forward.launches,
        recomputation=again * arrangement.recomputed_share,
        head=_head(model, arrangement, machine, constants) / arrangement.pipeline,
    )


def _forward(model: ModelShape, arrangement: Arrangement, machine: Machine, constants: Constants) -> _Forward:
    tokens, tensor = arrangement.tokens_of_rank(model), arrangement.tensor
    generation = constants.of(machine.generation)
    rate = machine.best(arrangement.precision) * getattr(generation, _field(arrangement.precision))
    speed = rate * _fill(tokens, constants)
    dense, sparse = model.dense_layers, model.expert_layers
    parameters = model.n_layers * model.attention_parameters + dense * model.dense_feed_forward
    products = 2 * tokens * parameters / tensor / speed
    width = model.d_ff * (model.matrices - 1)
    passes = constants.elementwise_passes * (model.n_layers * model.d_model + dense * width / 2) * tokens
    launches = model.n_layers * constants.block_seconds
    if model.experts is not None:
        copies = tokens * model.experts.per_token
        seen = copies * arrangement.expert / model.experts.number / tensor  # tokens of one expert on this rank
        products += sparse * 2 * copies * model.expert_parameters / tensor / (rate * _fill(seen, constants))
        products += sparse * 2 * tokens * model.experts.shared * model.expert_parameters / tensor / speed
        passes += sparse * constants.expert_passes * copies * (model.d_model + model.experts.d_ff)
        launches += sparse * 3 * constants.block_seconds
    attention = tokens * model.attention_flops_per_token / tensor / (machine.best("bf16") * generation.attention)
    elementwise = passes * ELEMENT / tensor / (machine.memory_bandwidth * REACHED)
    stages = arrangement.pipeline
    return _Forward(products / stages, attention / stages, elementwise / stages, launches / stages)


def _head(model: ModelShape, arrangement: Arrangement, machine: Machine, constants: Constants) -> float:
    """The head's products stay in 16 bits; its softmax reads and writes the logits."""
    tokens, precision = arrangement.tokens_of_rank(model), "fp32" if arrangement.precision == "fp32" else "bf16"
    speed = machine.best(precision) * constants.of(machine.generation).bf16 * _fill(tokens, constants)
    logits = constants.elementwise_passes / 2 * tokens * model.vocab_size * ELEMENT
    products = 6 * tokens * model.table / speed
    return (products + logits / (machine.memory_bandwidth * REACHED)) / arrangement.tensor


def optimizer_seconds(parameters: float, machine: Machine, constants: Constants) -> float:
    """Time of an AdamW step over `parameters`: it reads gradient, weight and moments, and writes all but the first."""
    return constants.optimizer_passes * 28 * parameters / (machine.memory_bandwidth * REACHED)


def _fill(tokens: float, constants: Constants) -> float:
    return tokens / (tokens + constants.half_tokens)


def _field(precision: str) -> str:
    return precision if precision in ("fp8", "mxfp8", "nvfp4") else "bf16"
