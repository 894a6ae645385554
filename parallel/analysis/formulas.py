"""Formulas for what a rank holds and sends in a step. Pure; `docs/parallelism.md` shows them as a table.

Tests compare them with what real ranks hold and send, so that no engine uses more than the formula. The formulas leave
out activations, the few bytes of loss and norm, and the traffic of tensor parallelism inside blocks.
"""

from dataclasses import dataclass

from parallel.config import ParallelConfig
from parallel.layout import Layout

MASTER, GRADIENT = 4, 4
"""Bytes per parameter in fp32."""
ADAMW = 8
"""Bytes of AdamW's state per parameter: two fp32 moments."""
REDUCE_BUCKET = 50_000_000
"""Most gradient elements that ZeRO reduces at a time. Stage 3 keeps a buffer of that many."""


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters in the part of the model that one tensor-parallel peer holds."""

    blocks: int
    """Parameters in all blocks together."""
    outer: int
    """Parameters outside of blocks: embedding, last norm, head. Tied ones count once."""
    n_blocks: int
    """Number of blocks."""
    tables: int
    """Those of `outer` that tokens and positions look up."""

    @property
    def all(self) -> int:
        """All parameters."""
        return self.blocks + self.outer


def working_bytes(config: ParallelConfig) -> int:
    """Bytes of a weight as the matrix products see it."""
    return 4 if config.precision == "fp32" else 2


def state_bytes(
    config: ParallelConfig, layout: Layout, parameters: Parameters, optimizer_bytes: float = ADAMW
) -> float:
    """Bytes of weights, gradients and optimizer state of a rank, between the last backward pass and the step.

    `optimizer_bytes`: optimizer state per parameter. Not included are working copies that live only within a pass
    (single, DDP, and what FSDP2 and ZeRO-3 gather)."""
    n, w = layout.shard, working_bytes(config)
    match config.engine:
        case "single" | "ddp":
            each = float(MASTER + GRADIENT + optimizer_bytes)
        case "fsdp2":
            each = (MASTER + GRADIENT + optimizer_bytes) / n
        case "zero1" if config.precision == "bf16" and not config.cpu_offload:  # DeepSpeed's BF16_Optimizer
            each = w + w + GRADIENT + (MASTER + optimizer_bytes) / n
        case "zero1" | "zero2":
            each = w + (GRADIENT + MASTER + optimizer_bytes) / n
        case "zero3":
            bucket = GRADIENT * min(REDUCE_BUCKET, parameters.all)
            return (w + GRADIENT + MASTER + optimizer_bytes) / n * parameters.all + bucket
    return each * parameters.all


def traffic_bytes(
    config: ParallelConfig, layout: Layout, parameters: Parameters, micro_batches: int
) -> dict[str, float]:
    """Bytes per step of each kind of collective, counted as `parallel.analysis.traffic` counts them."""
    w, passes = working_bytes(config), micro_batches
    reductions = passes if config.reduce_every_micro_batch else 1
    again: float = parameters.blocks if config.reshard_after_forward else 0
    moved: dict[str, float] = {}
    match config.engine:
        case "single":
            pass
        case "ddp":
            moved = {"all_reduce": GRADIENT * parameters.all}
        case "fsdp2":
            in_blocks = 1 if config.gathers_fp8 else w
            moved = {
                "all_gather": passes * (w * parameters.outer + in_blocks * (parameters.blocks + again)),
                "reduce_scatter": reductions * GRADIENT * parameters.all,
            }
            if layout.shard == 1:
                moved = {}
            if layout.replicate > 1:
                moved["all_reduce"] = GRADIENT * parameters.all / layout.shard
        case "zero1":
            moved = {"all_reduce": GRADIENT * parameters.all, "all_gather": w * parameters.all}
        case "zero2":
            moved = {"all_reduce": passes * GRADIENT * parameters.all, "all_gather": w * parameters.all}
        case "zero3":
            if config.reshard_after_forward:  # DeepSpeed keeps the last three blocks between forward and backward
                kept = min(3, parameters.n_blocks)
                again = parameters.tables + parameters.blocks * (parameters.n_blocks - kept) / parameters.n_blocks
            moved = {
                "all_gather": passes * w * (parameters.all + again),
                "reduce_scatter": passes * GRADIENT * parameters.all,
            }
    return moved if layout.data_parallel_size > 1 else {}
