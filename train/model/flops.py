"""What a model must compute, and what this machine can."""

import time

import torch

from train.model.config import ModelConfig


def count_parameters(config: ModelConfig) -> int:
    """Parameters, tied ones once."""
    d, layers = config.d_model, config.n_layers
    kv_width = config.kv_heads * config.head_dim
    matrices = 2 * d * d + 2 * d * kv_width + (3 if config.activation == "swiglu" else 2) * d * config.ff_width
    biases = (2 * d + 2 * kv_width + config.ff_width + d) if config.bias else 0
    if config.bias and config.activation == "swiglu":
        biases += config.ff_width
    norm = d * (2 if config.norm == "layernorm" and config.bias else 1)
    block = matrices + biases + 2 * norm + (2 * config.head_dim if config.qk_norm else 0)
    embeddings = config.vocab_size * d * (1 if config.tied_embeddings else 2)
    positions = config.seq_len * d if config.positions == "learned" else 0
    return embeddings + positions + layers * block + norm


def flops_per_token(config: ModelConfig) -> int:
    """Forward and backward FLOP of one token: 6 N + 12 L H E T (PaLM, Chowdhery et al. 2022, appendix B).

    N counts the parameters that are multiplied: the head once, lookups not at all. Recomputation is not counted."""
    lookups = 0 if config.tied_embeddings else config.vocab_size * config.d_model
    lookups += config.seq_len * config.d_model if config.positions == "learned" else 0
    attention = 12 * config.n_layers * config.n_heads * config.head_dim * config.seq_len
    return 6 * (count_parameters(config) - lookups) + attention


def measure_matmul_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.05) -> float:
    """FLOP per second of a large matrix product on this rank's device and threads: the best of five tries or more."""
    n = 1024 if device.type == "cpu" else 8192
    a, b = torch.randn(2, n, n, device=device).to(dtype)
    taken: list[float] = []
    while len(taken) < 5 or sum(taken) < seconds:
        start = time.perf_counter()
        (a @ b).sum().item()  # waits for the device
        taken.append(time.perf_counter() - start)
    return 2 * n**3 / min(taken)


def step_products(config: ModelConfig) -> list[tuple[int, int, int]]:
    """The matrices that tokens are multiplied by: (how many, rows, columns). Attention's own products are not here."""
    d, kv_width, ff = config.d_model, config.kv_heads * config.head_dim, config.ff_width
    layers, gated = config.n_layers, config.activation == "swiglu"
    return [
        (2 * layers, d, d),  # query, output
        (2 * layers, kv_width, d),  # key, value
        ((2 if gated else 1) * layers, ff, d),  # up, gate
        (layers, d, ff),  # down
        (1, config.vocab_size, d),  # head
    ]
