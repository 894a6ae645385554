import pytest
import torch
from torch import nn

from parallel.engines.precision import LossScaler, working_weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


def test_weights_are_narrow_and_tied_inside_and_unchanged_outside() -> None:
    model = Tied()
    before = model.embed.weight
    with working_weights(model, torch.bfloat16):
        assert model(torch.tensor([1])).dtype == torch.bfloat16
        assert model.head.weight is model.embed.weight
        assert torch.equal(model.head.weight, before.bfloat16())
    assert model.head.weight is model.embed.weight is before
    assert before.dtype == torch.float32


def test_gradients_reach_the_fp32_parameters_over_several_backward_passes() -> None:
    torch.manual_seed(0)
    model = Tied()
    tokens = torch.tensor([1, 2, 2])
    with working_weights(model, torch.bfloat16):
        for _ in range(3):
            model(tokens).float().square().sum().backward()
    gradient = model.embed.weight.grad
    assert gradient is not None
    assert gradient.dtype == torch.float32
    model.embed.weight.grad = None
    model(tokens).square().sum().backward()
    exact = model.embed.weight.grad
    assert exact is not None
    assert (gradient - 3 * exact).norm() < 0.02 * gradient.norm()


def test_an_error_inside_restores_the_parameters() -> None:
    model = Tied()
    with pytest.raises(IndexError), working_weights(model, torch.bfloat16):
        model(torch.tensor([8]))
    assert isinstance(model.embed.weight, nn.Parameter)


def test_a_bf16_weight_would_not_change_where_its_fp32_master_does() -> None:
    master, narrow = torch.ones(768), torch.ones(768, dtype=torch.bfloat16)
    for _ in range(100):
        master -= 6e-4
        narrow -= 6e-4
    assert (narrow == 1.0).all()
    assert (master < 0.95).all()


def test_the_scale_halves_on_overflow_and_doubles_after_enough_good_steps() -> None:
    scaler = LossScaler()
    scaler.update(finite=False)
    assert scaler.scale.item() == 2.0**15
    for _ in range(LossScaler.GROWTH_STEPS):
        assert scaler.scale.item() == 2.0**15
        scaler.update(finite=True)
    assert scaler.scale.item() == 2.0**16
    assert scaler.good_steps.item() == 0
