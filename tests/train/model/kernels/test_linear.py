"""Products in fp32 where a CPU has none in the precision of the input."""

import pytest
import torch
from torch import nn

from train.model.kernels import linear
from train.model.kernels.linear import Linear, is_slow


@pytest.mark.parametrize("bias", [True, False])
def test_a_narrow_layer_computes_what_a_wide_one_does_and_rounds_the_results(
    monkeypatch: pytest.MonkeyPatch, bias: bool
) -> None:
    monkeypatch.setattr(linear, "SLOW", frozenset({torch.bfloat16}))
    torch.manual_seed(1)
    narrow = Linear(24, 8, bias=bias).bfloat16()
    wide = nn.Linear(24, 8, bias=bias)
    wide.load_state_dict(narrow.state_dict())
    x = torch.randn(3, 5, 24).bfloat16().requires_grad_()
    x32 = x.detach().float().requires_grad_()
    grad = torch.randn(3, 5, 8).bfloat16()
    y, y32 = narrow(x), wide(x32)
    assert torch.equal(y, y32.bfloat16())
    found = torch.autograd.grad(y, (x, *narrow.parameters()), grad)
    expected = torch.autograd.grad(y32, (x32, *wide.parameters()), grad.float())
    for actual, right in zip(found, expected, strict=True):
        assert actual.dtype == torch.bfloat16
        torch.testing.assert_close(actual.float(), right.bfloat16().float(), rtol=1e-2, atol=1e-6)


def test_only_narrow_tensors_on_a_cpu_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "SLOW", frozenset({torch.bfloat16}))
    assert is_slow(torch.ones(1).bfloat16())
    assert not is_slow(torch.ones(1))
    assert not is_slow(torch.ones(1, device="meta").bfloat16())


def test_a_layer_keeps_no_wide_copy_for_its_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "SLOW", frozenset({torch.bfloat16}))
    kept: list[torch.dtype] = []
    layer, x = Linear(8, 8).bfloat16(), torch.ones(2, 8).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.dtype) or tensor, lambda t: t):
        layer(x)
    assert set(kept) == {torch.bfloat16}
