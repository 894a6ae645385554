"""CUDA graphs on a CPU: a recording is replaced by running the same passes again, with the same fixed memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from parallel.bootstrap import start
from parallel.build_engine import build_engine
from parallel.engines import ddp, graphs, single
from parallel.environ import World
from parallel.errors import LaunchError
from tests.parallel.engine_trial import LOSS, config_of, micro_batches, one_step, runtime_of, trainable
from tests.parallel.ranks import run_ranks


def record_on_cpu(passes: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """What `record_on_cuda` returns, after the same number of runs."""
    for _ in range(graphs.WARM_UP_RUNS):
        passes()
    return passes


def curve(settings: dict[str, Any], steps: int = 3) -> list[tuple[list[float], float]]:
    """The losses and gradient norms of the first steps, each of two micro batches. Collective."""
    settings = dict(settings)
    graph = settings.pop("cuda_graphs", False)
    config = config_of(**settings)
    runtime = runtime_of(config)
    config = config.model_copy(update={"cuda_graphs": graph})  # `start` refuses graphs on a CPU
    recorders = [mock.patch.object(module, "record_on_cuda", record_on_cpu) for module in (single, ddp)]
    with recorders[0], recorders[1]:
        engine = build_engine(config, runtime, trainable())
    found = [one_step(engine, runtime, step) for step in range(steps)]
    engine.evaluate(micro_batches(1, runtime, number=1)[0][0], LOSS)
    return [*found, one_step(engine, runtime, steps)]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_graph_trains_with_the_bits_of_plain_passes(precision: str) -> None:
    settings = {"engine": "single", "precision": precision}
    assert curve({**settings, "cuda_graphs": True}) == curve(settings)


def curves(cases: list[dict[str, Any]]) -> list[list[tuple[list[float], float]]]:
    """The curve of each case. Collective."""
    return [curve(settings) for settings in cases]


def test_a_graph_under_ddp_averages_the_gradients_of_all_micro_batches() -> None:
    cases = [{"engine": "ddp"}, {"engine": "ddp", "cuda_graphs": True}]
    for plain, replayed in run_ranks(__file__, "curves", 2, cases):
        for (losses, norm), (same_losses, same_norm) in zip(plain, replayed, strict=True):
            assert same_losses == pytest.approx(losses, rel=1e-5)
            assert same_norm == pytest.approx(norm, rel=1e-5)


class Values:
    """A batch of one tensor."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def copy(self) -> "Values":
        return Values(self.values.clone())

    def fill(self, other: "Values") -> None:
        self.values.copy_(other.values)


def test_a_replay_fills_fixed_memory_and_returns_a_copy_of_the_sums() -> None:
    """Recorded operations know addresses alone, so the passes must see the same tensors in each run."""
    seen: list[tuple[int, ...]] = []
    gradients, result = torch.zeros(4), torch.empty(4)

    def passes(batch: Any, scale: Tensor) -> Tensor:
        seen.append((batch.values.data_ptr(), scale.data_ptr()))
        gradients.add_(batch.values * scale)
        return result.copy_(batch.values)

    graph = graphs.MicroBatchGraph(gradients, record_on_cpu)
    first, second = (graph.run(passes, Values(torch.full((4,), value)), 0.5) for value in (2.0, 6.0))
    assert (first.tolist(), second.tolist()) == ([2.0] * 4, [6.0] * 4)
    assert gradients.tolist() == [4.0] * 4  # of the two replays, not of the runs before the recording
    assert len(set(seen)) == 1
    assert len(seen) == graphs.WARM_UP_RUNS + 2


def test_kernels_are_chosen_before_the_recording_and_random_numbers_begin_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`record_on_cuda` with stand-ins for torch's functions on CUDA, which write down the order of calls."""
    calls: list[str] = []

    @contextmanager
    def recording(_graph: object, capture_error_mode: str) -> Iterator[None]:
        calls.append(f"begin, {capture_error_mode}")
        yield
        calls.append("end")

    def passes() -> Tensor:
        calls.append("passes")
        return torch.ones(())

    stream = mock.Mock()
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: "numbers")
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: calls.append(f"set {state}"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: mock.Mock(replay=lambda: calls.append("replay")))
    monkeypatch.setattr(torch.cuda, "graph", recording)
    replay = graphs.record_on_cuda(passes)
    assert replay() is replay()
    recorded = ["set numbers", "begin, thread_local", "passes", "end"]
    assert calls == ["passes"] * graphs.WARM_UP_RUNS + recorded + ["replay"] * 2


def test_a_rank_on_a_cpu_is_refused_at_start_up() -> None:
    config = config_of(engine="single", cuda_graphs=True)
    with pytest.raises(
        LaunchError, match=r"parallel.cuda_graphs \(true\) needs a CUDA device, .* has cpu; set .* false"
    ):
        start(config, World(0, 1, 0, 1, "", 0, "single"))
