"""Every form of attention computes the same, and none attends across a document's boundary."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from train.errors import ConfigError
from train.model.attention import (
    AttentionChoice,
    Boundaries,
    Form,
    attend,
    best_form,
    choose_form,
    dense_mask,
    find_boundaries,
)
from train.model.kernels import cuda
from train.model.kernels.cuda import document_offsets, visible

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


def on_cpu(documents_BT: Tensor, form: Form) -> Boundaries:
    return find_boundaries(documents_BT, AttentionChoice(form))


@pytest.mark.parametrize("form", ["products", "sdpa"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("case", CASES)
def test_a_cpu_form_equals_the_dense_form_with_its_gradients(case: str, heads: tuple[int, int], form: Form) -> None:
    documents_BT = CASES[case]
    B, T = documents_BT.shape
    q, k, v = projections(B, T, *heads)
    cpu_form, dense = (attend(q, k, v, b) for b in (on_cpu(documents_BT, form), dense_mask(documents_BT)))
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


@pytest.mark.parametrize("form", ["products", "sdpa"])
def test_bf16_attention_has_no_larger_error_than_torchs_own(form: Form) -> None:
    documents_BT = CASES["one document a row"]
    q, k, v = projections(2, 300, 4, 4, torch.bfloat16)
    exact = [x.double().detach().requires_grad_() for x in (q, k, v)]
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(2)).bfloat16()

    def results(inputs: Any, boundaries: Boundaries) -> list[Tensor]:
        q, k, v = inputs
        out = attend(q, k, v, boundaries)
        return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]

    truth = results(exact, dense_mask(documents_BT))
    cpu_form, torchs = (results((q, k, v), b) for b in (on_cpu(documents_BT, form), dense_mask(documents_BT)))
    for actual, other, right in zip(cpu_form, torchs, truth, strict=True):
        error, allowed = ((x.double() - right).norm() / right.norm() for x in (actual, other))
        assert error < max(1.5 * allowed.item(), 0.004)


def test_an_exporter_gets_plain_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert torch.equal(find_boundaries(CASES["shorter than a chunk"]), dense_mask(CASES["shorter than a chunk"]))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("has_bf16", "has_amx", "form"),
    [(True, False, "products"), (True, True, "sdpa"), (False, False, "sdpa"), (False, True, "sdpa")],
)
def test_a_cpu_computes_in_the_form_that_fits_its_instructions(
    monkeypatch: pytest.MonkeyPatch, has_bf16: bool, has_amx: bool, form: Form
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    assert best_form("cpu") == choose_form("auto", "cpu", "bf16") == form
    assert AttentionChoice().on(torch.device("cpu")) == form
    assert AttentionChoice("products").on(torch.device("cpu")) == choose_form("products", "cpu", "bf16") == "products"


def test_a_form_for_another_device_or_precision_is_refused_with_a_way_out() -> None:
    assert choose_form("auto", "cuda", "fp32") == choose_form("flex", "cuda", "fp32") == "flex"
    assert choose_form("auto", "mps", "bf16") == "dense"
    with pytest.raises(
        ConfigError, match=r"attention \(flash\) is not for .* cpu; set it to one of auto, products, sdpa"
    ):
        choose_form("flash", "cpu", "bf16")
    with pytest.raises(
        ConfigError, match=r"attention \(cudnn\) does not support .* fp32; set parallel.attention to flex"
    ):
        choose_form("cudnn", "cuda", "fp32")


def test_offsets_of_documents_end_each_document_at_its_row() -> None:
    assert document_offsets(documents(5, (2, 3), ())).tolist() == [0, 2, 3, 5, 10]


def test_the_block_mask_is_compiled_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings are errors here. Torch 2.13 deprecates its own argument `_compile`."""
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function: compiled.append(function) or function)
    cuda._compiled_create_block_mask.cache_clear()
    mask = cuda.block_mask(CASES["boundaries inside and between chunks"])
    cuda._compiled_create_block_mask.cache_clear()
    assert compiled == [create_block_mask]
    assert mask.shape == (2, 1, 300, 300)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("form", "dtype"), [("flex", torch.float32), ("flash", torch.bfloat16), ("cudnn", torch.bfloat16)]
)
def test_attention_on_cuda_equals_the_dense_form(form: Form, dtype: torch.dtype) -> None:
    documents_BT = CASES["boundaries inside and between chunks"].cuda()
    q, k, v = (tensor.detach().cuda().to(dtype).requires_grad_() for tensor in projections(2, 300, 4, 2))
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in (q, k, v)]
    found = attend(q, k, v, find_boundaries(documents_BT, AttentionChoice(form)))
    dense = attend(*exact, dense_mask(documents_BT.cpu()))  # pyright: ignore[reportCallIssue]
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.double().cpu(), dense, atol=tolerance, rtol=tolerance)
    for actual, expected in zip(
        torch.autograd.grad(found.sum(), (q, k, v)), torch.autograd.grad(dense.sum(), exact), strict=True
    ):
        torch.testing.assert_close(actual.double().cpu(), expected, atol=tolerance, rtol=tolerance)
