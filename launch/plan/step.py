"""Time of an optimizer step, by part.

    step = m (computation + exchanges that nothing hides) (1 + bubble) + data-parallel exchanges + optimizer + constant

with m micro batches. The bubble of 1F1B is (P - 1) / m of that, divided by the stages of a rank when they are
interleaved (Narayanan et al. 2021, section 2.2).
"""

from dataclasses import dataclass

from launch.plan.communication import Links, micro_batch_exchanges
from launch.plan.compute import computation_seconds, optimizer_seconds
from launch.plan.constants import Constants, read_constants
from launch.plan.machine import Machine
from launch.plan.shapes import Arrangement, ModelShape


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by what they are spent on."""

    products: float
    attention: float
    elementwise: float
    launches: float
    recomputation: float
    head: float
    tensor: float
    """Exchanges of tensor parallelism that nothing hides; so with the following three."""
    context: float
    expert: float
    stages: float
    bubble: float
    data: float
    """Gathering of weights and reduction of gradients that nothing hides."""
    optimizer: float
    other: float

    @property
    def total(self) -> float:
        """The whole step."""
        return sum(vars(self).values())


def step_seconds(
    model: ModelShape, arrangement: Arrangement, machine: Machine, constants: Constants | None = None
) -> StepTime:
    """Time of one optimizer step. KeyError if the machine cannot multiply in the precision."""
    constants = constants or read_constants()
    links, m = Links(machine, constants), arrangement.micro_batches
    computation = computation_seconds(model, arrangement, machine, constants)
    exchanges = micro_batch_exchanges(model, arrangement, links)
    exposed = {
        "tensor": constants.tensor_exposed * exchanges.tensor,
        "context": constants.context_exposed * exchanges.context,
        "expert": constants.expert_exposed * exchanges.expert,
    }
    micro_batch = computation.total + sum(exposed.values())
    updated = parameters_of_rank(model, arrangement) / arrangement.optimizer_ranks
    bubble = constants.bubble * (arrangement.pipeline - 1) / arrangement.virtual_stages * micro_batch
    return StepTime(
        **{name: m * seconds for name, seconds in vars(computation).items()},
        **{name: m * seconds for name, seconds in exposed.items()},
        stages=m * constants.stage_exposed * exchanges.stages,
        bubble=bubble,
        data=data_parallel_seconds(model, arrangement, links, m * micro_batch),
        optimizer=optimizer_seconds(updated, machine, constants),
        other=constants.step_seconds,
    )


def parameters_of_rank(model: ModelShape, arrangement: Arrangement) -> float:
    """Parameters of a tensor and pipeline rank, before sharding. The outer ones lie on the first and last stage."""
    stages, ends = arrangement.pipeline, min(2, arrangement.pipeline)
    blocks = model.block_parameters / arrangement.tensor / stages
    return blocks + model.all_experts / arrangement.expert / stages + model.outer_parameters / arrangement.tensor / ends


def data_parallel_seconds(model: ModelShape, arrangement: Arrangement, links: Links, computation: float) -> float:
    """Seconds of a step's data-parallel exchanges that the `computation` (seconds) does not hide."""
    ranks = arrangement.data * arrangement.context
    if ranks == 1:
        return 0.0
    parameters, gradient = parameters_of_rank(model, arrangement), arrangement.gradient_bytes
    working = arrangement.working_bytes
    if not arrangement.shards_weights:
        both = 2 * gradient if arrangement.engine == "ddp" else working + gradient
        if arrangement.engine == "zero2":  # DeepSpeed reduces after every micro batch
            both = working + 2 * gradient * arrangement.micro_batches
        return links.constants.gradient_exposed * links.ring_seconds(both * parameters, ranks, arrangement.tensor)
    shard = arrangement.optimizer_ranks
    gathers = 2 if arrangement.reshard_after_forward else 1
    scatters = arrangement.micro_batches if arrangement.reduce_every_micro_batch else 1
    gather = links.ring_seconds(working * parameters, shard, arrangement.tensor)
    scatter = links.ring_seconds(gradient * parameters, shard, arrangement.tensor)
    beside = arrangement.micro_batches * gathers * gather + scatters * scatter
    slowdown = links.constants.shard_slowdown
    exposed = max(slowdown * min(beside, computation), beside - (1 - slowdown) * computation)
    replicas = ranks // shard
    reduced = links.ring_seconds(2 * gradient * parameters / shard, replicas, arrangement.tensor * shard)
    return exposed + links.constants.gradient_exposed * reduced


def tokens_per_second(model: ModelShape, arrangement: Arrangement, machine: Machine) -> float:
    """Tokens per second of all GPUs together."""
    return arrangement.global_batch_size * model.seq_len / step_seconds(model, arrangement, machine).total
