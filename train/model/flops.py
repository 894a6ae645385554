"""Counts of parameters and FLOP, from the settings alone; and the speed of matrix products on this device."""

import time

import torch

from train.model.attention_layer import Attention
from train.model.block import Block
from train.model.config import ModelConfig
from train.model.gpt import GPT
from train.model.parameters import Parameter


def _repeated(config: ModelConfig) -> list[tuple[int, Parameter]]:
    """Each declared parameter with the number of times that the model has it."""
    blocks = [(config.n_layers, parameter) for parameter in Block.declare(config).values()]
    return blocks + [(1, parameter) for parameter in GPT.declare(config).values()]


def count_parameters(config: ModelConfig) -> int:
    """Number of parameters; tied ones count once."""
    return sum(times * parameter.size for times, parameter in _repeated(config))


def flops_per_token(config: ModelConfig) -> int:
    """Forward and backward FLOP of one token: 6 N + 12 L H E T (PaLM, Chowdhery et al. 2022, appendix B).

    N counts the parameters that a token is multiplied by: the head once, lookups not at all. Recomputation is not
    counted."""
    multiplied = sum(times * parameter.size * parameter.multiplied for times, parameter in _repeated(config))
    return 6 * round(multiplied) + config.n_layers * Attention.flops_per_token(config)


def step_products(config: ModelConfig) -> list[tuple[int, int, int]]:
    """The matrices that tokens are multiplied by, as (times, rows, columns). Attention's own products are left out."""
    return [
        (times, *parameter.shape)
        for times, parameter in _repeated(config)
        if len(parameter.shape) == 2 and parameter.multiplied
    ]


def measure_matmul_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.05) -> float:
    """FLOP per second of a large matrix product on this rank's device and threads: the best of at least five tries."""
    n = 1024 if device.type == "cpu" else 8192
    a, b = torch.randn(2, n, n, device=device).to(dtype)
    taken: list[float] = []
    while len(taken) < 5 or sum(taken) < seconds:
        start = time.perf_counter()
        (a @ b).sum().item()  # waits for the device
        taken.append(time.perf_counter() - start)
    return 2 * n**3 / min(taken)
