"""The fused loss and its gradients equal those of the plain loss."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import train.model.loss
from data_pipeline.stream.batch import IGNORE
from parallel.config import ParallelConfig
from parallel.engines.blocks import apply_to_blocks
from train.model.config import ModelConfig
from train.model.gpt import GPT
from train.model.loss import _through_logits, chunk_tokens, linear_cross_entropy_by_row

B, T, D, V = 4, 24, 32, 160


def cross_entropy_by_row(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """The plain loss: the sum of each sequence in nats, shape (B,), fp32."""
    return F.cross_entropy(logits_BTV.float().mT, labels_BT, ignore_index=IGNORE, reduction="none").sum(dim=1)


def drawn(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x_BTD = torch.randn(B, T, D, generator=generator).to(dtype).requires_grad_()
    weight_VD = (torch.randn(V, D, generator=generator) * 0.2).to(dtype).requires_grad_()
    labels_BT = torch.randint(0, V, (B, T), generator=generator)
    labels_BT[0, 5:9] = labels_BT[2] = IGNORE
    return x_BTD, weight_VD, labels_BT


@pytest.fixture(params=[1, 7, B * T])
def tokens_of_a_chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train.model.loss, "CHUNK_TOKENS", 1)
    monkeypatch.setattr(train.model.loss, "CHUNK_BYTES", request.param * 4 * V)


@pytest.mark.usefixtures("tokens_of_a_chunk")
def test_loss_and_gradients_equal_those_of_the_plain_loss() -> None:
    x_BTD, weight_VD, labels_BT = drawn()
    scale = 1 / 57
    fused_B = linear_cross_entropy_by_row(x_BTD, weight_VD, labels_BT)
    plain_B = cross_entropy_by_row(x_BTD @ weight_VD.T, labels_BT)
    torch.testing.assert_close(fused_B, plain_B, rtol=1e-6, atol=1e-6)
    fused = torch.autograd.grad(fused_B.sum() * scale, (x_BTD, weight_VD))
    plain = torch.autograd.grad(plain_B.sum() * scale, (x_BTD, weight_VD))
    for actual, expected in zip(fused, plain, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_bf16_loss_and_gradient_are_close_to_the_exact_ones() -> None:
    x_BTD, weight_VD, labels_BT = drawn(torch.bfloat16)
    exact = cross_entropy_by_row(x_BTD.double() @ weight_VD.double().T, labels_BT).sum()
    fused = linear_cross_entropy_by_row(x_BTD, weight_VD, labels_BT).sum()
    assert fused.item() == pytest.approx(exact.item(), rel=1e-3)
    exact_d = torch.autograd.grad(exact, weight_VD)[0].double()
    fused_d = torch.autograd.grad(fused, weight_VD)[0].double()
    assert ((fused_d - exact_d).norm() / exact_d.norm()).item() < 0.01


def test_ignored_labels_have_no_loss_and_no_gradient() -> None:
    x_BTD, weight_VD, labels_BT = drawn()
    loss_B = linear_cross_entropy_by_row(x_BTD, weight_VD, labels_BT)
    loss_B.sum().backward()
    assert loss_B[2].item() == 0
    assert x_BTD.grad is not None
    assert not x_BTD.grad[labels_BT == IGNORE].any()
    assert x_BTD.grad[labels_BT != IGNORE].any(dim=-1).all()


def test_rows_with_different_weights_are_refused() -> None:
    x_BTD, weight_VD, labels_BT = drawn()
    loss_B = linear_cross_entropy_by_row(x_BTD, weight_VD, labels_BT)
    with pytest.raises(RuntimeError, match="one gradient for all rows"):
        (loss_B * torch.arange(B)).sum().backward()


def test_without_gradients_none_are_computed() -> None:
    x_BTD, weight_VD, labels_BT = drawn()
    with torch.no_grad():
        loss_B = linear_cross_entropy_by_row(x_BTD, weight_VD, labels_BT)
    assert not loss_B.requires_grad
    torch.testing.assert_close(loss_B, linear_cross_entropy_by_row(x_BTD, weight_VD, labels_BT).detach())


def test_the_compiled_loss_and_its_gradients_equal_the_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = torch.compile(_through_logits, backend="aot_eager", dynamic=False)  # generates no code
    monkeypatch.setattr(train.model.loss, "_compiled", lambda: backend)
    x_BTD, weight_VD, labels_BT = drawn()
    plain_B, compiled_B = (
        linear_cross_entropy_by_row(x_BTD, weight_VD, labels_BT, compiled=compiled) for compiled in (False, True)
    )
    torch.testing.assert_close(compiled_B, plain_B, rtol=1e-6, atol=1e-6)
    for actual, expected in zip(
        torch.autograd.grad(compiled_B.sum(), (x_BTD, weight_VD)),
        torch.autograd.grad(plain_B.sum(), (x_BTD, weight_VD)),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_the_head_of_a_compiled_model_compiles_its_loss() -> None:
    for compile_it in (False, True):
        with torch.device("meta"):
            model = GPT(ModelConfig(vocab_size=64, seq_len=8, n_layers=1, n_heads=1, d_model=8))
        apply_to_blocks(model, ParallelConfig(compile=compile_it))
        assert model.head.compiled is compile_it


def test_the_host_reads_no_result() -> None:
    """A fake tensor has no elements, so to read one raises an error."""
    with FakeTensorMode():
        x_BTD, weight_VD = torch.empty(B, T, D, requires_grad=True), torch.empty(V, D, requires_grad=True)
        loss_B = linear_cross_entropy_by_row(x_BTD, weight_VD, torch.zeros(B, T, dtype=torch.int64))
        (loss_B.sum() * 0.5).backward()
        assert x_BTD.grad is not None
        assert x_BTD.grad.shape == (B, T, D)


def test_chunks_on_a_device_have_two_to_four_thousand_tokens_and_equal_sizes() -> None:
    assert chunk_tokens("cuda", 16_384, 32_000) == 4096
    assert chunk_tokens("cuda", 16_384, 131_072) == 2048
    assert chunk_tokens("cuda", 10_000, 32_000) == 3334
    assert chunk_tokens("cuda", 100, 131_072) == 100
    assert chunk_tokens("cpu", 16_384, 8_192) == 512


@pytest.mark.gpu
def test_the_kernel_on_cuda_agrees_with_the_plain_loss() -> None:
    x_BTD, weight_VD, labels_BT = (t.detach().cuda() for t in drawn())
    x_BTD.requires_grad_()
    fused_B = linear_cross_entropy_by_row(x_BTD, weight_VD, labels_BT)
    plain_B = cross_entropy_by_row(x_BTD @ weight_VD.T, labels_BT)
    torch.testing.assert_close(fused_B, plain_B, rtol=1e-5, atol=1e-5)
    actual, expected = (torch.autograd.grad(loss.sum(), x_BTD)[0] for loss in (fused_B, plain_B))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
