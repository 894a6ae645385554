"""Memory of one GPU, by part. Bytes, in closed form.

P: parameters of this rank's tensor and pipeline part; n: ranks that share the state; w: bytes of a working weight.

| part            | single, ddp | fsdp2                         | zero1     | zero2   | zero3                |
| --------------- | ----------- | ----------------------------- | --------- | ------- | -------------------- |
| masters         | 4 P         | 4 P / n                       | 4 P / n   | 4 P / n | 4 P / n              |
| gradients       | 4 P         | 4 P / n                       | (w + 4) P | 4 P / n | 4 P / n              |
| optimizer state | 8 P         | 8 P / n                       | 8 P / n   | 8 P / n | 8 P / n              |
| working weights | w P in bf16 | w (outer unit and two blocks) | w P       | w P     | w P / n, and as fsdp2 |

tests/launch/plan/test_memory.py compares the state with parallel/analysis/formulas.py, and the activations with what
blocks of the real model keep.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from launch.plan.machine import Machine
from launch.plan.shapes import Arrangement, ModelShape
from launch.plan.step import parameters_of_rank

ADAMW = 8
"""Bytes of the optimizer's state per parameter: two fp32 moments."""
CONTEXT_BYTES = 1.0e9
"""What CUDA, NCCL and the libraries of products take. An assumption: measured values lie between 0.5 and 2 GB."""
FRAGMENTATION = 0.05
"""Memory that the allocator holds beyond what is in use. An assumption; `expandable_segments` keeps it small."""
LOSS_TOKENS = 384
LOSS_BYTES = 2**24
"""Sizes of the fused loss's chunks (train/model/loss.py)."""


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


def memory(model: ModelShape, arrangement: Arrangement, optimizer_bytes: float = ADAMW) -> Memory:
    """Memory of the fullest rank. With pipeline stages that is the first, which holds most micro batches."""
    state = state_bytes(model, arrangement, optimizer_bytes)
    passing = activation_bytes(model, arrangement) | loss_bytes(model, arrangement)
    at_loss, in_blocks = sum(passing.values()), passing["activations"] + passing["recomputed block"]
    if at_loss - passing["recomputed block"] >= in_blocks:
        moment, passing["recomputed block"] = "the loss of a micro batch", 0.0
    else:
        moment, passing["logits and loss"] = "the backward pass of the last block", 0.0
    parts = {**state, **passing, "exchange buffers": _buffers(model, arrangement)}
    parts["allocator"] = FRAGMENTATION * sum(parts.values())
    return Memory({**parts, "CUDA context": CONTEXT_BYTES}, moment)


def state_bytes(model: ModelShape, arrangement: Arrangement, optimizer_bytes: float = ADAMW) -> dict[str, float]:
    """Weights, gradients, optimizer state and working copies."""
    all_of_rank, n, w = parameters_of_rank(model, arrangement), arrangement.optimizer_ranks, arrangement.working_bytes
    shared = all_of_rank / n
    whole_gradients = arrangement.engine in ("single", "ddp")
    gradients = 4 * (all_of_rank if whole_gradients else shared)
    if arrangement.engine == "zero1":  # DeepSpeed's BF16_Optimizer keeps both kinds whole; others keep fp32 alone
        gradients = (w + 4) * all_of_rank if arrangement.precision == "bf16" else 4 * shared
    if arrangement.engine == "fsdp2" and not arrangement.reduce_every_micro_batch:
        gradients += 4 * all_of_rank
    return {
        "weights": 4 * shared,
        "gradients": gradients,
        "optimizer state": optimizer_bytes * shared,
        "working weights": _working_weights(model, arrangement),
    }


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
    layers = model.n_layers / arrangement.pipeline
    gathered = 2 * blocks / layers if arrangement.reshard_after_forward else blocks
    return kept + w * (_outer(model, arrangement) + min(gathered, blocks))


def _outer(model: ModelShape, arrangement: Arrangement) -> float:
    return model.outer_parameters / arrangement.tensor / min(2, arrangement.pipeline)


def block_activation_bytes(model: ModelShape, arrangement: Arrangement) -> float:
    """What one block keeps for its backward pass, per micro batch, if nothing is recomputed.

    Kept of each token, in 16 bits: the block's input, both normalized inputs and the middle of the residual stream (4
    d_model); queries, keys, values and attention's result; the feed-forward layer's products. Under tensor parallelism
    the normalized inputs are whole on each rank, and the rest is cut."""
    tokens, w, tensor = arrangement.tokens_of_rank(model), arrangement.working_bytes, arrangement.tensor
    heads = model.head_dim * (2 * model.n_heads + 2 * model.n_kv_heads)
    width = model.matrices * model.d_ff
    if model.experts is not None:
        width = model.matrices * model.experts.d_ff * (model.experts.per_token + model.experts.shared)
        width += 2 * model.experts.per_token * model.d_model
    whole, cut = 2 * model.d_model, 2 * model.d_model + heads + width
    norms = 8 / tensor  # an fp32 scale per norm
    return tokens * (w * (whole + cut / tensor) + norms)


def activation_bytes(model: ModelShape, arrangement: Arrangement) -> dict[str, float]:
    """Activations that all micro batches under way keep, and those of a block that is computed again.

    A stage of 1F1B has as many micro batches under way as stages follow it, with interleaving a little more
    (Korthikanti et al. 2022, section 4.2.3)."""
    block, stages = block_activation_bytes(model, arrangement), arrangement.pipeline
    tokens, w, tensor = arrangement.tokens_of_rank(model), arrangement.working_bytes, arrangement.tensor
    stream = w * tokens * model.d_model / tensor
    heads = model.head_dim * (2 * model.n_heads + 2 * model.n_kv_heads) / tensor
    products = (model.matrices - 1) * model.d_ff / tensor
    kept = {
        "none": block,
        "attention": block,
        "full": stream,
        "selective": 3 * stream + w * tokens * (heads + products),
    }[arrangement.recomputation]
    under_way = min(stages, arrangement.micro_batches)
    if arrangement.virtual_stages > 1:
        under_way *= 1 + (stages - 1) / (stages * arrangement.virtual_stages)
    again = 0.0 if arrangement.recomputation in ("none", "attention") else block - kept
    return {
        "activations": model.n_layers / stages * kept * under_way + 2 * stream,
        "recomputed block": again,
    }


def loss_bytes(model: ModelShape, arrangement: Arrangement) -> dict[str, float]:
    """The fused loss: one chunk of logits in fp32 and in working precision, and both gradients.

    Under tensor parallelism all logits of the rank's part of the vocabulary exist at once, in both forms."""
    tokens, w, tensor = arrangement.tokens_of_rank(model), arrangement.working_bytes, arrangement.tensor
    if tensor > 1:
        return {"logits and loss": tokens * model.vocab_size / tensor * (2 * w + 4)}
    chunk = min(tokens, max(LOSS_TOKENS, LOSS_BYTES // (4 * model.vocab_size)))
    gradients = tokens * model.d_model * w + model.table * (4 + w)
    return {"logits and loss": chunk * model.vocab_size * (2 * w + 4) + gradients}


def _buffers(model: ModelShape, arrangement: Arrangement) -> float:
    """fsdp2 reduces a block's whole fp32 gradients while the next block's arise; ZeRO has buckets of 50 M elements."""
    if arrangement.engine == "fsdp2" and arrangement.optimizer_ranks > 1:
        blocks = parameters_of_rank(model, arrangement) - _outer(model, arrangement)
        largest = max(blocks * arrangement.pipeline / model.n_layers, _outer(model, arrangement))
        return (arrangement.gradient_bytes + arrangement.working_bytes) * largest
    if arrangement.engine.startswith("zero"):
        return 4 * min(50_000_000, parameters_of_rank(model, arrangement))
    return 0.0
