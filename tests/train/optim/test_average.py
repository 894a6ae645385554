"""The average of the weights against its formula, step by step."""

import pytest
import torch
from torch import nn

from train.optim.adamw import FusedAdamW
from train.optim.average import average_name, is_average, share_of_new, start_averages, swap_averages
from train.optim.muon import MuonAdamW


def test_the_average_follows_the_weights_faster_while_the_run_is_young() -> None:
    assert share_of_new(1, 0.999) == 1.0
    assert share_of_new(11, 0.999) == pytest.approx(0.5)
    assert share_of_new(10_000, 0.999) == pytest.approx(0.001)
    shares = [share_of_new(step, 0.99) for step in range(1, 2000)]
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize("algorithm", [FusedAdamW, MuonAdamW])
def test_each_step_that_moves_weights_moves_their_average(algorithm: type[FusedAdamW]) -> None:
    torch.manual_seed(1)
    moved, still = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(3))
    groups = [{"params": [moved], "muon": algorithm is MuonAdamW}, {"params": [still], "muon": False}]
    optimizer = algorithm(groups, lr=0.1, ema_decay=0.4)
    optimizer.create_state()
    expected = torch.zeros(6, 5, dtype=torch.float64)
    for step in range(1, 21):
        moved.grad = torch.randn(6, 5)
        optimizer.step()
        decay = min(0.4, (step - 1) / (step + 9))
        expected = decay * expected + (1 - decay) * moved.detach().double()
        average = optimizer.state[moved]["average"]
        assert torch.allclose(average.double(), expected, atol=1e-6)
        if step == 1:
            assert torch.equal(average, moved.detach())
    assert not optimizer.state[still]["average"].any(), "it had no gradient"
    before = optimizer.state[moved]["average"].clone()
    moved.grad = None
    optimizer.step()
    assert torch.equal(optimizer.state[moved]["average"], before)


def test_without_a_decay_there_is_no_average() -> None:
    optimizer = FusedAdamW([{"params": [nn.Parameter(torch.ones(2))]}], lr=0.1)
    optimizer.create_state()
    [state] = optimizer.state.values()
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_a_swap_exchanges_every_bit_and_a_second_one_undoes_it() -> None:
    state = {"model.a": torch.randn(4), "optim.a.average": torch.randn(4), "optim.a.exp_avg": torch.randn(4)}
    before = {name: tensor.clone() for name, tensor in state.items()}
    swap_averages(state)
    assert torch.equal(state["model.a"], before["optim.a.average"])
    assert torch.equal(state["optim.a.average"], before["model.a"])
    swap_averages(state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.items())
    start_averages(state)
    assert torch.equal(state["optim.a.average"], before["model.a"])
    assert torch.equal(state["optim.a.exp_avg"], before["optim.a.exp_avg"])


def test_the_names_of_averages() -> None:
    assert average_name("model.layers.0.norm.weight") == "optim.layers.0.norm.weight.average"
    assert is_average("optim.x.average")
    assert not is_average("model.average")
