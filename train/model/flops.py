"""Counts of parameters and FLOP, from the settings alone; and the speed of matrix products on this device."""

import time

import torch

from train.model.attention_layer import Attention
from train.model.block import Block
from train.model.config import ModelConfig
from train.model.gpt import GPT
from train.model.kernels.linear import SLOW
from train.model.parameters import Parameter


def _repeated(config: ModelConfig) -> list[tuple[int, Parameter]]:
    """Each declared parameter with the number of times that the model has it."""
    blocks = [(config.n_layers, parameter) for parameter in Block.declare(config).values()]
    return blocks + [(1, parameter) for parameter in GPT.declare(config).values()]


def count_parameters(config: ModelConfig) -> int:
    """Number of parameters; tied ones count once."""
    return sum(times * parameter.size for times, parameter in _repeated(config))


def flops_per_token(config: ModelConfig) -> int:
    """Forward and backward FLOP of one token: 6 N + 6 L H E T.

    PaLM (Chowdhery et al. 2022, appendix B) has 12 L H E T, without regard to causality. N counts the parameters that a
    token is multiplied by: the head once, lookups not at all. Recomputation is not counted, and boundaries of documents
    are not regarded."""
    multiplied = sum(times * parameter.size * parameter.multiplied for times, parameter in _repeated(config))
    return 6 * round(multiplied) + config.n_layers * Attention.flops_per_token(config)


def step_products(config: ModelConfig) -> list[tuple[int, int, int]]:
    """The matrices that tokens are multiplied by, as (times, rows, columns). Attention's own products are left out."""
    return [
        (times, *parameter.shape)
        for times, parameter in _repeated(config)
        if len(parameter.shape) == 2 and parameter.multiplied
    ]


LONG_SECONDS = 0.1
"""A product that takes as long is large enough to measure, on a CPU without vector units too."""


def measure_matmul_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.05) -> float:
    """FLOP per second of a large matrix product on this rank's device and threads: the best of at least five tries.

    Where the model multiplies in fp32 because the CPU has no products in `dtype`, so does this."""
    if device.type == "cpu" and dtype in SLOW:
        dtype = torch.float32
    n, largest = 128, 1024 if device.type == "cpu" else 8192
    while n < largest and _product_seconds(n, device, dtype) < LONG_SECONDS:
        n *= 2
    taken: list[float] = []
    while len(taken) < 5 or sum(taken) < seconds:
        taken.append(_product_seconds(n, device, dtype))
    return 2 * n**3 / min(taken)


def _product_seconds(n: int, device: torch.device, dtype: torch.dtype) -> float:
    """Time of one product of two n x n matrices."""
    a, b = torch.randn(2, n, n, device=device).to(dtype)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    (a @ b).sum().item()  # waits for the device
    return time.perf_counter() - start
