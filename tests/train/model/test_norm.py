"""RMSNorm has the values and gradients of torch's, and keeps only its inputs for the backward pass."""

import pytest
import torch
from torch import Tensor, nn

from train.model.norm import RMSNorm

SHAPE = (2, 8, 32)


def norm_of(kind: type[nn.RMSNorm], dtype: torch.dtype) -> nn.RMSNorm:
    norm = kind(SHAPE[-1], 1e-5).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2.0, SHAPE[-1]))
    return norm


def drawn(seed: int, dtype: torch.dtype) -> Tensor:
    return (3 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))).to(dtype).requires_grad_()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-3)])
def test_the_norm_equals_torchs(dtype: torch.dtype, tolerance: float) -> None:
    results = []
    for kind in (nn.RMSNorm, RMSNorm):
        norm, x = norm_of(kind, dtype), drawn(1, dtype)
        y = norm(x)
        y.backward(drawn(2, dtype))
        results.append((y, x.grad, norm.weight.grad))
    torchs, actual = results
    assert torch.equal(actual[0], torchs[0])
    assert actual[0].dtype == dtype
    for gradient, expected in zip(actual[1:], torchs[1:], strict=True):
        torch.testing.assert_close(gradient, expected, atol=tolerance, rtol=tolerance)


def test_only_inputs_and_one_scale_per_row_are_kept() -> None:
    x, norm = drawn(6, torch.bfloat16), norm_of(RMSNorm, torch.bfloat16)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        norm(x)
    assert sum(kept.values()) == x.nbytes + norm.weight.nbytes + 4 * SHAPE[0] * SHAPE[1]
