import pytest
import torch

from parallel.bootstrap import start
from parallel.config import ParallelConfig
from parallel.environ import read_world
from train.losses import PendingLosses, StepLosses


def test_means_are_over_targets_by_source_and_for_each_metric() -> None:
    losses = StepLosses(sums_S=[6.0, 0.0, 4.0], metric_sums_M=[5.0], targets_S=[2.0, 0.0, 3.0])
    assert losses.mean == 2.0
    assert losses.by_source(["a", "b", "c"]) == {"loss/a": 3.0, "loss/c": pytest.approx(4 / 3)}
    assert losses.metrics(["auxiliary_loss"]) == {"auxiliary_loss": 1.0}


def test_one_source_has_no_loss_by_source() -> None:
    assert StepLosses([6.0], [], [2.0]).by_source(["a"]) == {}


def test_pending_losses_are_gathered_once() -> None:
    runtime = start(ParallelConfig(engine="single", device="cpu"), read_world({}))
    sums = torch.tensor([1.0, 2.0, 3.0])
    pending = PendingLosses(sums, [4.0, 4.0], runtime)
    first = pending.gather()
    sums.zero_()
    assert pending.gather() is first
    assert first == StepLosses([1.0, 2.0], [3.0], [4.0, 4.0])
