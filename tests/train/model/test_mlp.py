"""The gate of SwiGLU has the bits of torch's operations, and keeps only its inputs for the backward pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from train.model.mlp import silu_times

SHAPE = (2, 8, 32)


def drawn(seed: int, dtype: torch.dtype) -> Tensor:
    return (3 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_has_torchs_bits(dtype: torch.dtype) -> None:
    results = []
    for gated in (lambda gate, up: F.silu(gate) * up, silu_times):
        gate, up = drawn(3, dtype), drawn(4, dtype)
        y = gated(gate, up)
        y.backward(drawn(5, dtype))
        results.append((y, gate.grad, up.grad))
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(expected, actual)


def test_only_inputs_are_kept() -> None:
    gate, up = drawn(6, torch.bfloat16), drawn(7, torch.bfloat16)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        silu_times(gate, up)
    assert sum(kept.values()) == gate.nbytes + up.nbytes
