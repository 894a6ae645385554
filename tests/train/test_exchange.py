"""What ranks tell each other in a step. On one process, but for the count of collectives."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from data_pipeline.stream.batch import IGNORE, Batch
from parallel.bootstrap import Runtime, start
from parallel.config import ParallelConfig
from parallel.environ import read_world
from tests.chaos.harness import build_data
from tests.parallel.ranks import run_ranks
from train.exchange import Agreement, Exchange, StepLosses, word_of_rank_0


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return start(ParallelConfig(engine="single", device="cpu"), read_world({}))


def batches(read: list[int]) -> Iterator[list[Batch]]:
    """Steps of one row of 8 tokens. Step n has n targets, of source n % 2, and is noted in `read`."""
    for step in range(100):
        read.append(step)
        labels = np.where(np.arange(8) < step, 1, IGNORE)[None]
        zeros = np.zeros((1, 8), np.int64)
        yield [Batch(zeros, labels, zeros, zeros.astype(np.int32), np.array([step % 2], np.int32), np.array([step]))]


def test_means_are_over_targets_by_source_and_for_each_metric() -> None:
    losses = StepLosses(sums_S=[6.0, 0.0, 4.0], metric_sums_M=[5.0], targets_S=[2.0, 0.0, 3.0])
    assert losses.mean == 2.0
    assert losses.by_source(["a", "b", "c"]) == {"loss/a": 3.0, "loss/c": pytest.approx(4 / 3)}
    assert losses.metrics(["auxiliary_loss"]) == {"auxiliary_loss": 1.0}


def test_one_source_has_no_loss_by_source() -> None:
    assert StepLosses([6.0], [], [2.0]).by_source(["a"]) == {}


def test_a_step_carries_its_losses_and_the_facts_about_the_next_batch(runtime: Runtime) -> None:
    read: list[int] = []
    flags = [False, False, False]
    exchange = Exchange(batches(read), lambda: flags, runtime, n_sources=2)
    _, first = exchange.next_step()
    assert first == Agreement([0.0, 0.0], False, False, False)
    flags[1] = True
    exchange.read_next()
    values = exchange.values(torch.tensor([1.0, 2.0, 3.0]))
    assert values.tolist() == [1.0, 2.0, 3.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    assert exchange.receive(values.tolist()) == StepLosses([1.0, 2.0], [3.0], [0.0, 0.0]) == exchange.losses
    micro_batches, second = exchange.next_step()
    assert micro_batches[0].samples_B.tolist() == [1]
    assert second == Agreement([0.0, 1.0], False, True, False)
    assert read == [0, 1]


@pytest.mark.parametrize("same_data_ranks", [1, 3])
@pytest.mark.parametrize(("time_is_up", "steps"), [(False, 0), (True, 0), (False, 3), (True, 1000)])
def test_rank_0_tells_the_others_how_many_steps_to_profile(same_data_ranks: int, time_is_up: bool, steps: int) -> None:
    """Sums are divided by the number of ranks that see the same data, of which only rank 0 has a word to say."""
    runtime: Any = SimpleNamespace(layout=SimpleNamespace(same_data_ranks=same_data_ranks))
    exchange = Exchange(batches([]), lambda: (0, 0, word_of_rank_0(time_is_up, steps)), runtime, n_sources=2)
    exchange.read_next()
    exchange.receive(exchange.values(torch.zeros(2)).tolist())
    _, agreement = exchange.next_step()
    assert (agreement.time_is_up, agreement.profile_steps) == (time_is_up, steps)


def test_facts_that_no_step_carried_are_exchanged_before_the_next_one(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    flags = [False, False, False]
    exchange = Exchange(batches(read), lambda: flags, runtime, n_sources=2)
    for step in range(3):  # batches that are skipped
        micro_batches, agreement = exchange.next_step()
        assert micro_batches[0].samples_B.tolist() == [step]
        assert sum(agreement.targets_S) == step
    exchange.read_next()
    exchange.receive(exchange.values(torch.zeros(2)).tolist())
    exchange.ask_again()
    flags[2] = True
    micro_batches, agreement = exchange.next_step()
    assert micro_batches[0].samples_B.tolist() == [3], "the batch that was read is kept"
    assert agreement.time_is_up, "and the ranks are asked again"


def test_without_a_next_batch_a_step_carries_no_agreement(runtime: Runtime) -> None:
    read: list[int] = []
    exchange = Exchange(batches(read), lambda: [False] * 3, runtime, n_sources=2)
    exchange.next_step()
    exchange.receive(exchange.values(torch.zeros(2)).tolist())
    assert read == [0]
    micro_batches, _ = exchange.next_step()  # the guard has skipped the last step
    assert micro_batches[0].samples_B.tolist() == [1]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_data(tmp_path_factory.mktemp("data"))


def test_a_step_has_one_small_collective_and_none_between_hosts(tmp_path: Path, data: Path) -> None:
    """It carries loss, targets, flags and the norm, but under ZeRO, which adds up the norm by itself."""
    argument = {"data": str(data), "runs": str(tmp_path), "engines": ["ddp", "fsdp2", "zero1"]}
    for rank in run_ranks("tests/train/exchange_ranks.py", "collectives_of_a_step", 2, argument):
        assert rank == {engine: {"all_reduce": 1.0} for engine in argument["engines"]}
