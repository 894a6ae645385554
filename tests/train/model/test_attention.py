"""Every form of attention computes the same, and none crosses a document's boundary. Cases 11, 23."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import train.model.attention
from train.model.attention import CHUNK, Boundaries, attend, cut, dense_mask, document_starts, find_boundaries, visible

E = 16


def projections(B: int, T: int, H: int, K: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(11)
    made = (torch.randn(B, T, heads, E, generator=generator).to(dtype) for heads in (H, K, K))
    return tuple(tensor.requires_grad_() for tensor in made)


def documents(T: int, *rows: tuple[int, ...]) -> Tensor:
    """Rows with boundaries before the given tokens."""
    return torch.stack([sum((torch.arange(T) >= cut).int() for cut in row) + torch.zeros(T).int() for row in rows])


CASES = {
    "one document a row": documents(300, (), ()),
    "boundaries inside and between chunks": documents(300, (128,), (1, 60, 128, 200, 299)),
    "every token a document": documents(300, tuple(range(1, 300)), ()),
    "shorter than a chunk": documents(5, (3,), ()),
}


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("case", CASES)
def test_the_form_for_cpu_is_the_dense_form_with_its_gradients(case: str, heads: tuple[int, int]) -> None:
    documents_BT = CASES[case]
    B, T = documents_BT.shape
    q, k, v = projections(B, T, *heads)
    ours, dense = (attend(q, k, v, b) for b in (find_boundaries(documents_BT), dense_mask(documents_BT)))
    torch.testing.assert_close(ours, dense, atol=1e-5, rtol=1e-5)
    grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2))
    for mine, theirs in zip(
        torch.autograd.grad(ours, (q, k, v), grad), torch.autograd.grad(dense, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_the_dense_form() -> None:
    """As far as it runs on a CPU: forward, and not compiled."""
    documents_BT = CASES["boundaries inside and between chunks"]
    q, k, v = (tensor.detach() for tensor in projections(2, 300, 4, 2))
    block_mask = create_block_mask(visible(documents_BT), 2, None, 300, 300, "cpu")
    out = flex_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=block_mask, enable_gqa=True
    )
    assert isinstance(out, Tensor)
    torch.testing.assert_close(out.transpose(1, 2), attend(q, k, v, dense_mask(documents_BT)), atol=1e-5, rtol=1e-5)


def test_bf16_attention_errs_no_more_than_torchs_own() -> None:
    documents_BT = CASES["one document a row"]
    q, k, v = projections(2, 300, 4, 4, torch.bfloat16)
    exact = [x.double().detach().requires_grad_() for x in (q, k, v)]
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(2)).bfloat16()

    def results(inputs: Any, boundaries: Boundaries) -> list[Tensor]:
        q, k, v = inputs
        out = attend(q, k, v, boundaries)
        return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]

    truth = results(exact, dense_mask(documents_BT))
    ours, torchs = (results((q, k, v), b) for b in (find_boundaries(documents_BT), dense_mask(documents_BT)))
    for mine, theirs, right in zip(ours, torchs, truth, strict=True):
        mistake, allowed = ((x.double() - right).norm() / right.norm() for x in (mine, theirs))
        assert mistake < max(1.5 * allowed.item(), 0.004)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=3 * CHUNK), st.integers(1, 3))
@settings(deadline=None, max_examples=50)
def test_chunks_hold_every_visible_key_once(steps: list[int], rows: int) -> None:
    """Whatever the documents: what the chunks show is what the dense mask shows."""
    one_T = torch.tensor(steps)
    documents_BT = torch.stack([one_T.eq(0).cumsum(0), *[torch.zeros_like(one_T)] * (rows - 1)])
    seen_BTT = torch.zeros(rows, len(steps), len(steps))
    for chunk in cut(document_starts(documents_BT), heads=1):
        of_chunk = (chunk.rows, slice(chunk.start, chunk.end))
        seen_BTT[*of_chunk, chunk.first_key : chunk.end] += 1
        seen_BTT[*of_chunk, chunk.end - chunk.hiding.shape[1] : chunk.end] += chunk.hiding
    assert torch.equal(seen_BTT.clamp(min=0), dense_mask(documents_BT)[:, 0].float())


def test_no_work_is_done_for_keys_of_earlier_documents() -> None:
    (first, second) = cut(document_starts(documents(2 * CHUNK, (CHUNK,))), heads=1)
    assert (first.first_key, second.first_key) == (0, CHUNK)


def test_rows_that_see_the_same_keys_are_multiplied_together() -> None:
    alike_then_other = document_starts(documents(2 * CHUNK, (), (), (CHUNK,)))
    shapes = [(c.rows.start, c.rows.stop, c.start) for c in cut(alike_then_other, heads=4)]
    assert shapes == [(0, 3, 0), (0, 2, CHUNK), (2, 3, CHUNK)]
    assert len(list(cut(alike_then_other, heads=10**6))) == 6  # too many heads for the cache: each row by itself


def test_compiling_sees_one_operation_and_changes_nothing() -> None:
    documents_BT = CASES["shorter than a chunk"]
    q, k, v = (tensor.detach() for tensor in projections(2, 5, 4, 2))
    torch.library.opcheck(train.model.attention._attention, (q, k, v, find_boundaries(documents_BT)))


def test_an_exporter_gets_plain_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert torch.equal(find_boundaries(CASES["shorter than a chunk"]), dense_mask(CASES["shorter than a chunk"]))  # pyright: ignore[reportArgumentType]


@pytest.mark.gpu
def test_attention_on_cuda_is_the_dense_form() -> None:
    documents_BT = CASES["boundaries inside and between chunks"].cuda()
    q, k, v = (tensor.detach().cuda().requires_grad_() for tensor in projections(2, 300, 4, 2))
    ours, dense = (attend(q, k, v, b) for b in (find_boundaries(documents_BT), dense_mask(documents_BT)))
    torch.testing.assert_close(ours, dense, atol=1e-4, rtol=1e-4)
    for mine, theirs in zip(
        torch.autograd.grad(ours.sum(), (q, k, v)), torch.autograd.grad(dense.sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
