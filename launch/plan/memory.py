"""Memory of one GPU, by part. Bytes, in closed form.

P: parameters of this rank's tensor and pipeline part; n: ranks that share the state; w: bytes of a working weight.

| part            | single, ddp | fsdp2                         | zero1     | zero2   | zero3                |
| --------------- | ----------- | ----------------------------- | --------- | ------- | -------------------- |
| masters         | 4 P         | 4 P / n                       | 4 P / n   | 4 P / n | 4 P / n              |
| gradients       | 4 P         | 4 P / n                       | (w + 4) P | 4 P / n | 4 P / n              |
| optimizer state | 8 P         | 8 P / n                       | 8 P / n   | 8 P / n | 8 P / n              |
| working weights | w P in bf16 | w (outer unit and a block)    | w P       | w P     | w P / n, and as fsdp2 |

A step has three moments at which memory may be fullest: the loss, the backward pass of the last block, and the end of
the backward pass.

tests/launch/plan/test_memory.py compares the state with parallel/analysis/formulas.py, the activations with what blocks
of the real model keep, and the peak with the bytes that are alive in a step of the real engines on fake tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from launch.plan.activations import Backend, activation_bytes, loss_bytes, stream_bytes
from launch.plan.machine import Machine
from launch.plan.shapes import Arrangement, ModelShape
from launch.plan.step import parameters_of_rank

ADAMW = 8
"""Bytes of the optimizer's state per parameter: two fp32 moments."""
AVERAGE = 4
"""Bytes of the average of a parameter, with `optim.ema_decay`."""
CONTEXT_BYTES = 1.0e9
"""What CUDA, NCCL and the libraries of products take. An assumption: measured values lie between 0.5 and 2 GB."""
BUCKET = 50_000_000
"""Gradient elements that ZeRO reduces at a time."""
PROCESS_MIB = {"single": 290, "ddp": 310, "fsdp2": 415, "zero": 555}
"""Memory of a process on a CPU without its tensors: Python, torch and what the engine imports and keeps. Fitted on the
same runs as HOLES."""
HOLES = 2.8
"""Heap that glibc holds on a CPU and that no tensor fits into, as a multiple of the loss's buffers, which are the
largest temporary ones. Fitted on the runs in bench/published/measured.csv."""
FRAGMENTATION = 0.05
"""Memory that the allocator holds beyond what is in use. An assumption; `expandable_segments` keeps it small."""


OVERHEAD = ("allocator", "CUDA context", "process")
"""Parts that are no tensors."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU by part, at the fullest moment of a step."""

    parts: Mapping[str, float]
    moment: str
    """When it is fullest."""

    @property
    def total(self) -> float:
        """All parts."""
        return sum(self.parts.values())

    def fits(self, machine: Machine) -> bool:
        """Whether the machine has as much."""
        return self.total <= machine.memory_bytes


def memory(
    model: ModelShape, arrangement: Arrangement, optimizer_bytes: float = ADAMW, backend: Backend = "gpu"
) -> Memory:
    """Memory of the fullest rank. With pipeline stages that is the first, which holds most micro batches."""
    moments = {
        "the loss of a micro batch": _at_loss(model, arrangement, optimizer_bytes, backend),
        "the backward pass of the last block": _in_blocks(model, arrangement, optimizer_bytes, backend),
        "the end of the backward pass": _at_end(model, arrangement, optimizer_bytes),
    }
    moment, parts = max(moments.items(), key=lambda entry: sum(entry[1].values()))
    return Memory(parts | overhead_bytes(sum(parts.values()), model, arrangement, backend), moment)


def in_use(found: Memory) -> float:
    """Bytes of tensors, without what allocator and libraries take."""
    return sum(size for name, size in found.parts.items() if name not in OVERHEAD)


def overhead_bytes(used: float, model: ModelShape, arrangement: Arrangement, backend: Backend) -> dict[str, float]:
    """What allocator and libraries take beyond the `used` bytes."""
    if backend == "gpu":
        return {"allocator": FRAGMENTATION * used, "CUDA context": CONTEXT_BYTES}
    family = "zero" if arrangement.engine.startswith("zero") else arrangement.engine
    if arrangement.tensor > 1:
        family = "fsdp2"
    holes = HOLES * loss_bytes(model, arrangement, backend)
    return {"allocator": holes, "process": PROCESS_MIB[family] * 2.0**20}


def state_bytes(model: ModelShape, arrangement: Arrangement, optimizer_bytes: float = ADAMW) -> dict[str, float]:
    """Weights, gradients, optimizer state and working copies, once all gradients are complete."""
    all_of_rank, n, w = parameters_of_rank(model, arrangement), arrangement.optimizer_ranks, arrangement.working_bytes
    shared = all_of_rank / n
    whole_gradients = arrangement.engine in ("single", "ddp")
    gradients = 4 * (all_of_rank if whole_gradients else shared)
    if arrangement.engine == "zero1" and not arrangement.offload:  # other systems than DeepSpeed keep fp32 alone
        gradients = (w + 4) * all_of_rank if arrangement.precision == "bf16" else 4 * shared
    if arrangement.engine == "fsdp2" and not arrangement.reduce_every_micro_batch and arrangement.micro_batches > 1:
        gradients = 4 * all_of_rank
    on_device = 0 if arrangement.offload else 1
    return {
        "weights": 4 * shared * on_device,
        "gradients": gradients * on_device,
        "optimizer state": optimizer_bytes * shared * on_device,
        "working weights": _working_weights(model, arrangement),
    }


def _at_loss(model: ModelShape, arrangement: Arrangement, optimizer_bytes: float, backend: Backend) -> dict[str, float]:
    """All activations and a chunk of logits. Gradients are those of earlier micro batches."""
    parts = state_bytes(model, arrangement, optimizer_bytes)
    if arrangement.micro_batches == 1 and arrangement.engine in ("single", "fsdp2"):
        parts["gradients"] = 0.0
    parts["activations"] = activation_bytes(model, arrangement, backend)["activations"]
    return parts | {
        "logits and loss": loss_bytes(model, arrangement, backend),
        "exchange buffers": _bucket(model, arrangement),
    }


def _in_blocks(
    model: ModelShape, arrangement: Arrangement, optimizer_bytes: float, backend: Backend
) -> dict[str, float]:
    """All activations, a block that is computed again, and the gradients of this block before they are reduced."""
    parts = state_bytes(model, arrangement, optimizer_bytes) | activation_bytes(model, arrangement, backend)
    w, block = arrangement.working_bytes, _block(model, arrangement)
    buffers = _bucket(model, arrangement) + w * block
    if _gathers(arrangement):
        parts["working weights"] += w * block  # the next block is gathered meanwhile
        buffers += 2 * arrangement.gradient_bytes * block
    head = w * model.table / arrangement.tensor if model.tied and _gathers(arrangement) else 0.0
    return parts | {"logits and loss": head + stream_bytes(model, arrangement), "exchange buffers": buffers}


def _at_end(model: ModelShape, arrangement: Arrangement, optimizer_bytes: float) -> dict[str, float]:
    """The embedding's gradient, whole, and its reduction."""
    parts = state_bytes(model, arrangement, optimizer_bytes)
    w, table = arrangement.working_bytes, model.table / arrangement.tensor
    buffers = _bucket(model, arrangement)
    if _gathers(arrangement):
        buffers = arrangement.gradient_bytes * _outer(model, arrangement)
    return parts | {"logits and loss": w * table * (2 if model.tied else 1), "exchange buffers": buffers}


def _gathers(arrangement: Arrangement) -> bool:
    """Whether the engine is FSDP2 with weights that are sharded."""
    return arrangement.engine == "fsdp2" and arrangement.optimizer_ranks > 1


def _working_weights(model: ModelShape, arrangement: Arrangement) -> float:
    all_of_rank, w = parameters_of_rank(model, arrangement), arrangement.working_bytes
    if arrangement.engine in ("single", "ddp"):
        return w * all_of_rank if w < 4 else 0.0
    if not arrangement.shards_weights:
        return w * all_of_rank
    kept = w * all_of_rank / arrangement.optimizer_ranks if arrangement.engine == "zero3" else 0.0
    if arrangement.optimizer_ranks == 1 and w == 4:
        return kept  # nothing is gathered and nothing is cast
    blocks = parameters_of_rank(model, arrangement) - _outer(model, arrangement)
    gathered = _block(model, arrangement) if arrangement.reshard_after_forward else blocks
    outer = _outer(model, arrangement)
    if arrangement.reshard_after_forward and not model.tied:  # the embedding's unit is freed after its lookup
        outer = model.table / arrangement.tensor
    return kept + w * (outer + min(gathered, blocks))


def _outer(model: ModelShape, arrangement: Arrangement) -> float:
    return model.outer_parameters / arrangement.tensor / min(2, arrangement.pipeline)


def _block(model: ModelShape, arrangement: Arrangement) -> float:
    """Parameters of a block that a rank holds, before sharding."""
    blocks = parameters_of_rank(model, arrangement) - _outer(model, arrangement)
    return blocks * arrangement.pipeline / model.n_layers


def _bucket(model: ModelShape, arrangement: Arrangement) -> float:
    """ZeRO's bucket of gradients."""
    if not arrangement.engine.startswith("zero"):
        return 0.0
    return 4 * min(BUCKET, parameters_of_rank(model, arrangement))
