"""The lean norm and gate have torch's values and gradients, and keep no more than their inputs."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.model.recompute import RMSNorm, silu_times

SHAPE = (2, 8, 32)


def norm_of(kind: type[nn.RMSNorm], dtype: torch.dtype) -> nn.RMSNorm:
    norm = kind(SHAPE[-1], 1e-5).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2.0, SHAPE[-1]))
    return norm


def drawn(seed: int, dtype: torch.dtype, scale: float = 3.0) -> Tensor:
    return (scale * torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))).to(dtype).requires_grad_()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-3)])
def test_the_norm_is_torchs(dtype: torch.dtype, tolerance: float) -> None:
    results = []
    for kind in (nn.RMSNorm, RMSNorm):
        norm, x = norm_of(kind, dtype), drawn(1, dtype)
        y = norm(x)
        y.backward(drawn(2, dtype))
        results.append((y, x.grad, norm.weight.grad))
    theirs, ours = results
    assert torch.equal(ours[0], theirs[0])
    assert ours[0].dtype == dtype
    for mine, other in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(mine, other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_has_torchs_bits(dtype: torch.dtype) -> None:
    results = []
    for gated in (lambda gate, up: F.silu(gate) * up, silu_times):
        gate, up = drawn(3, dtype), drawn(4, dtype)
        y = gated(gate, up)
        y.backward(drawn(5, dtype))
        results.append((y, gate.grad, up.grad))
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("what", ["norm", "gate"])
def test_only_inputs_are_kept(what: str) -> None:
    x, up = drawn(6, torch.bfloat16), drawn(7, torch.bfloat16)
    norm = norm_of(RMSNorm, torch.bfloat16)
    compute: Callable[[], Tensor] = (lambda: norm(x)) if what == "norm" else (lambda: silu_times(x, up))
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute()
    rows = SHAPE[0] * SHAPE[1]
    inputs = {"norm": x.nbytes + norm.weight.nbytes + 4 * rows, "gate": x.nbytes + up.nbytes}
    assert sum(kept.values()) == inputs[what]
