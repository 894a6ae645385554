"""What a rank holds and what it sends in a step, as formulas. Pure; `docs/parallelism.md` shows them as a table.

Tests compare them with what is counted on real ranks, so that no engine moves or keeps more than it says. Left out:
activations, the few bytes of loss and norm, and what tensor parallelism exchanges inside blocks.
"""

from dataclasses import dataclass

from parallel.config import ParallelConfig
from parallel.layout import Layout

MASTER, MOMENTS, GRADIENT = 4, 8, 4
"""Bytes per parameter in fp32."""
REDUCE_BUCKET = 50_000_000
"""Most gradients that ZeRO reduces at once; stage 3 keeps a buffer of that many."""


@dataclass(frozen=True)
class Parameters:
    """Counts of the part of the model that one tensor-parallel peer holds."""

    blocks: int
    """In all blocks together."""
    outer: int
    """Outside of them: embedding, last norm, head. Tied ones count once."""
    n_blocks: int
    tables: int
    """Of `outer`: what tokens and positions look up."""

    @property
    def all(self) -> int:
        return self.blocks + self.outer


def working_bytes(config: ParallelConfig) -> int:
    """Bytes of a weight as the matrix products see it."""
    return 4 if config.precision == "fp32" else 2


def state_bytes(config: ParallelConfig, layout: Layout, parameters: Parameters) -> float:
    """Weights, gradients and optimizer state of a rank between the last backward pass and the optimizer's step.

    Working copies that live only within a pass (single, DDP, and what FSDP2 and ZeRO-3 gather) are not in it."""
    n, w = layout.shard, working_bytes(config)
    match config.engine:
        case "single" | "ddp":
            each = float(MASTER + GRADIENT + MOMENTS)
        case "fsdp2":
            each = (MASTER + GRADIENT + MOMENTS) / n
        case "zero1" if config.precision == "bf16" and not config.cpu_offload:  # DeepSpeed's BF16_Optimizer
            each = w + w + GRADIENT + (MASTER + MOMENTS) / n
        case "zero1" | "zero2":
            each = w + (GRADIENT + MASTER + MOMENTS) / n
        case "zero3":
            bucket = GRADIENT * min(REDUCE_BUCKET, parameters.all)
            return (w + GRADIENT + MASTER + MOMENTS) / n * parameters.all + bucket
    return each * parameters.all


def traffic_bytes(
    config: ParallelConfig, layout: Layout, parameters: Parameters, micro_batches: int
) -> dict[str, float]:
    """Bytes per step of each kind of collective, counted as `parallel.analysis.traffic` does."""
    w, passes = working_bytes(config), micro_batches
    reductions = passes if config.reduce_every_micro_batch else 1
    again: float = parameters.blocks if config.reshard_after_forward else 0
    moved: dict[str, float] = {}
    match config.engine:
        case "ddp":
            moved = {"all_reduce": GRADIENT * parameters.all}
        case "fsdp2":
            moved = {
                "all_gather": passes * w * (parameters.all + again),
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
