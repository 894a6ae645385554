"""Memory of what a forward pass keeps for its backward pass, and of the loss. Bytes, in closed form.

Kept of each token, in the working precision: a block's input, both normalized inputs and the middle of the residual
stream (4 d_model); queries, keys, values and attention's result; the feed-forward layer's products. Under tensor
parallelism the normalized inputs are whole on each rank, and the rest is cut (Korthikanti et al. 2022, section 4.2).

A CPU differs from a GPU: its loss has smaller chunks, and its norm keeps fp32 copies under tensor parallelism. A CPU
without products in 16 bits (`slow_cpu`) computes them in fp32: what `selective` keeps of them is fp32 too.
"""

from typing import Literal

from launch.plan.shapes import Arrangement, ModelShape

Backend = Literal["gpu", "cpu", "slow_cpu"]
"""Kind of device, as far as memory depends on it."""
CHUNK_TOKENS, CHUNK_BYTES = 384, 2**24
DEVICE_CHUNK_TOKENS, DEVICE_CHUNK_BYTES = (2048, 4096), 2**30
"""Sizes of the fused loss's chunks on a CPU and on other devices (train/model/loss.py)."""


def block_activation_bytes(model: ModelShape, arrangement: Arrangement, backend: Backend = "gpu") -> float:
    """What one block keeps for its backward pass, per micro batch, if nothing is recomputed."""
    tokens, w, tensor = arrangement.tokens_of_rank(model), arrangement.working_bytes, arrangement.tensor
    heads = model.head_dim * (2 * model.n_heads + 2 * model.n_kv_heads)
    width = model.matrices * model.d_ff
    if model.experts is not None:
        width = model.matrices * model.experts.d_ff * (model.experts.per_token + model.experts.shared)
        width += 2 * model.experts.per_token * model.d_model
    whole, cut = 2 * model.d_model, 2 * model.d_model + heads + width
    norms = 8 / tensor  # an fp32 scale per norm
    if tensor > 1 and backend != "gpu":
        norms += 8 * model.d_model / tensor
    return tokens * (w * (whole + cut / tensor) + norms)


def _kept_bytes(model: ModelShape, arrangement: Arrangement, backend: Backend) -> float:
    """What one recomputed block keeps until the backward pass reaches it, per micro batch."""
    tokens, w, tensor = arrangement.tokens_of_rank(model), arrangement.working_bytes, arrangement.tensor
    stream = w * tokens * model.d_model / tensor
    if arrangement.recomputation == "full":
        return stream
    if arrangement.recomputation != "selective":
        return block_activation_bytes(model, arrangement, backend)
    product = 4 if backend == "slow_cpu" else w
    results = 2 * model.d_model  # of the output and the last matrix; whole, before they are added up and scattered
    results += model.head_dim * (model.n_heads + 2 * model.n_kv_heads) / tensor
    results += (model.matrices - 1) * model.d_ff / tensor
    return stream + tokens * (product * results + w * model.n_heads * model.head_dim / tensor)


def activation_bytes(model: ModelShape, arrangement: Arrangement, backend: Backend = "gpu") -> dict[str, float]:
    """Activations that all micro batches under way keep, and those of a block that is computed again.

    A stage of 1F1B has as many micro batches under way as stages follow it, with interleaving a little more
    (Korthikanti et al. 2022, section 4.2.3)."""
    block, stages = block_activation_bytes(model, arrangement, backend), arrangement.pipeline
    kept, share = _kept_bytes(model, arrangement, backend), arrangement.recomputed_share
    under_way = min(stages, arrangement.micro_batches)
    if arrangement.virtual_stages > 1:
        under_way *= 1 + (stages - 1) / (stages * arrangement.virtual_stages)
    again = 0.0 if arrangement.recomputation in ("none", "attention") else block - kept
    of_blocks = model.n_layers / stages * (share * kept + (1 - share) * block)
    return {
        "activations": of_blocks * under_way + 2 * stream_bytes(model, arrangement),
        "recomputed block": again,
    }


def stream_bytes(model: ModelShape, arrangement: Arrangement) -> float:
    """The residual stream of a micro batch on one rank."""
    return arrangement.working_bytes * arrangement.tokens_of_rank(model) * model.d_model / arrangement.tensor


def loss_bytes(model: ModelShape, arrangement: Arrangement, backend: Backend = "gpu") -> float:
    """The fused loss: logits of a chunk in fp32 and in working precision, its gradient, and both factors' gradients.

    Under tensor parallelism all logits of the rank's part of the vocabulary exist at once, in both forms."""
    tokens, w, tensor = arrangement.tokens_of_rank(model), arrangement.working_bytes, arrangement.tensor
    if tensor > 1:
        return tokens * (model.vocab_size / tensor * (8 + (w if w < 4 else 0)) + 2 * w * model.d_model)
    product = 4 if backend == "slow_cpu" else w
    chunk = min(tokens, _chunk_tokens(tokens, model.vocab_size, backend))
    copies = (tokens * model.d_model + model.table) * product if product != w else 0.0
    gradients = tokens * model.d_model * product + 4 * model.table
    before = product if chunk < tokens else 0  # the gradient of the chunk before
    in_chunk = chunk * model.vocab_size * (product + 4 + before)
    after = chunk * model.vocab_size * product + model.table * product  # the chunk's part of the weight's gradient
    return copies + gradients + max(in_chunk, after)


def _chunk_tokens(tokens: float, vocab_size: int, backend: Backend) -> float:
    if backend != "gpu":
        return max(CHUNK_TOKENS, CHUNK_BYTES // (4 * vocab_size))
    fewest, most = DEVICE_CHUNK_TOKENS
    limit = min(most, max(fewest, DEVICE_CHUNK_BYTES // (4 * vocab_size)))
    return tokens / -(-tokens // limit)
