"""Every form of attention computes the same, and none attends across a document's boundary."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from train.model.attention import Boundaries, attend, dense_mask, find_boundaries, visible

E = 16


def projections(B: int, T: int, H: int, K: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(11)
    drawn = (torch.randn(B, T, heads, E, generator=generator).to(dtype) for heads in (H, K, K))
    return tuple(tensor.requires_grad_() for tensor in drawn)


def documents(T: int, *rows: tuple[int, ...]) -> Tensor:
    """Rows with document boundaries before the given tokens."""
    return torch.stack([sum((torch.arange(T) >= cut).int() for cut in row) + torch.zeros(T).int() for row in rows])


CASES = {
    "one document a row": documents(300, (), ()),
    "boundaries inside and between chunks": documents(300, (128,), (1, 60, 128, 200, 299)),
    "every token a document": documents(300, tuple(range(1, 300)), ()),
    "shorter than a chunk": documents(5, (3,), ()),
}


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("case", CASES)
def test_the_cpu_form_equals_the_dense_form_with_its_gradients(case: str, heads: tuple[int, int]) -> None:
    documents_BT = CASES[case]
    B, T = documents_BT.shape
    q, k, v = projections(B, T, *heads)
    cpu_form, dense = (attend(q, k, v, b) for b in (find_boundaries(documents_BT), dense_mask(documents_BT)))
    torch.testing.assert_close(cpu_form, dense, atol=1e-5, rtol=1e-5)
    grad = torch.randn(cpu_form.shape, generator=torch.Generator().manual_seed(2))
    for actual, expected in zip(
        torch.autograd.grad(cpu_form, (q, k, v), grad), torch.autograd.grad(dense, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_equals_the_dense_form() -> None:
    """On a CPU flex_attention runs only forward, and not compiled."""
    documents_BT = CASES["boundaries inside and between chunks"]
    q, k, v = (tensor.detach() for tensor in projections(2, 300, 4, 2))
    block_mask = create_block_mask(visible(documents_BT), 2, None, 300, 300, "cpu")
    out = flex_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=block_mask, enable_gqa=True
    )
    assert isinstance(out, Tensor)
    torch.testing.assert_close(out.transpose(1, 2), attend(q, k, v, dense_mask(documents_BT)), atol=1e-5, rtol=1e-5)


def test_bf16_attention_has_no_larger_error_than_torchs_own() -> None:
    documents_BT = CASES["one document a row"]
    q, k, v = projections(2, 300, 4, 4, torch.bfloat16)
    exact = [x.double().detach().requires_grad_() for x in (q, k, v)]
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(2)).bfloat16()

    def results(inputs: Any, boundaries: Boundaries) -> list[Tensor]:
        q, k, v = inputs
        out = attend(q, k, v, boundaries)
        return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]

    truth = results(exact, dense_mask(documents_BT))
    cpu_form, torchs = (results((q, k, v), b) for b in (find_boundaries(documents_BT), dense_mask(documents_BT)))
    for actual, other, right in zip(cpu_form, torchs, truth, strict=True):
        error, allowed = ((x.double() - right).norm() / right.norm() for x in (actual, other))
        assert error < max(1.5 * allowed.item(), 0.004)


def test_an_exporter_gets_plain_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert torch.equal(find_boundaries(CASES["shorter than a chunk"]), dense_mask(CASES["shorter than a chunk"]))  # pyright: ignore[reportArgumentType]


@pytest.mark.gpu
def test_attention_on_cuda_equals_the_dense_form() -> None:
    documents_BT = CASES["boundaries inside and between chunks"].cuda()
    q, k, v = (tensor.detach().cuda().requires_grad_() for tensor in projections(2, 300, 4, 2))
    flex, dense = (attend(q, k, v, b) for b in (find_boundaries(documents_BT), dense_mask(documents_BT)))
    torch.testing.assert_close(flex, dense, atol=1e-4, rtol=1e-4)
    for actual, expected in zip(
        torch.autograd.grad(flex.sum(), (q, k, v)), torch.autograd.grad(dense.sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
