"""Each rank draws its part alone, and the parts together have the same bits in every layout."""

import logging
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel.build_engine import build_empty_engine
from parallel.engines import initial
from parallel.engines.initial import HeldPart, fill_model, fill_parts
from tests.parallel.engine_trial import config_of, runtime_of, trainable
from tests.parallel.engines.initial_ranks import initial_weights
from tests.parallel.ranks import run_ranks

ON_TWO: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "fsdp2": {"engine": "fsdp2"},
    "tensor": {"engine": "fsdp2", "tensor": 2},
    "zero1": {"engine": "zero1"},
    "zero2": {"engine": "zero2"},
    "zero3": {"engine": "zero3"},
    "zero1, bf16": {"engine": "zero1", "precision": "bf16"},
}
ON_FOUR: dict[str, dict[str, Any]] = {
    "hsdp": {"engine": "fsdp2", "replicate": 2},
    "tensor and shard": {"engine": "fsdp2", "tensor": 2},
    "odd cuts": {"engine": "fsdp2"},
}
SHARES = {"ddp": 1.0, "hsdp": 0.5, "tensor and shard": 0.25, "odd cuts": 0.25}
"""Share of the weights that a rank draws, where it is not a half."""


def number_of(_: str, pairs: Tensor) -> Tensor:
    """Initial values that are the numbers of the elements."""
    return torch.stack((2 * pairs, 2 * pairs + 1), dim=-1).flatten(-2).float()


@pytest.fixture(scope="module")
def single() -> dict[str, Tensor]:
    return initial_weights({"single": {"engine": "single"}})["single"]["weights"]


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    """What each rank returns, by case."""
    file = "tests/parallel/engines/initial_ranks.py"
    results = {2: run_ranks(file, "initial_weights", 2, ON_TWO), 4: run_ranks(file, "initial_weights", 4, ON_FOUR)}
    return {
        name: [rank[name] for rank in results[size]] for size, cases in ((2, ON_TWO), (4, ON_FOUR)) for name in cases
    }


@pytest.mark.parametrize("name", [*ON_TWO, *ON_FOUR])
def test_gathered_initial_weights_equal_those_of_a_single_process(
    found: dict[str, list[dict[str, Any]]], single: dict[str, Tensor], name: str
) -> None:
    for rank in found[name]:
        assert rank["weights"].keys() == single.keys()
        for weight, value in single.items():
            assert torch.equal(rank["weights"][weight], value), weight


@pytest.mark.parametrize("name", [*ON_TWO, *ON_FOUR])
def test_a_rank_draws_only_the_elements_that_it_holds(
    found: dict[str, list[dict[str, Any]]], single: dict[str, Tensor], name: str
) -> None:
    size = sum(value.numel() for value in single.values())
    drawn = found[name][0]["drawn"]
    assert sum(drawn) == pytest.approx(size * len(drawn) * SHARES.get(name, 0.5), rel=0.01)  # norms may be held twice


@pytest.mark.parametrize("rank", [5, 11])
def test_a_rank_of_a_fake_world_draws_its_slice_of_the_whole(rank: int, single: dict[str, Tensor]) -> None:
    """12 ranks do not divide 40 rows and 128 rows evenly, and the last ranks hold nothing of some tensors."""
    [slices] = run_ranks("tests/parallel/engines/initial_ranks.py", "slices_of_fake_rank", 1, rank)
    for name, value in slices.items():
        chunks = single[f"model.{name}"].chunk(12)
        mine = chunks[rank] if rank < len(chunks) else single[f"model.{name}"][:0]
        assert torch.equal(value, mine), name
    assert len(slices) == len(single)


def test_parts_of_any_shape_are_filled_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value of an element is its number here. Blocks are smaller than the parts."""
    monkeypatch.setattr(initial, "CPU_BLOCK", 3)
    whole = torch.arange(6 * 5 * 4, dtype=torch.float32).view(6, 5, 4)
    boxes = [
        (whole, (0, 0, 0)),
        (whole[2:5], (2, 0, 0)),
        (whole[1:3, 2:4, 1:3], (1, 2, 1)),
        (whole[4:6, :, 3:], (4, 0, 3)),
    ]
    parts = [HeldPart("x", whole.shape, offsets, torch.full_like(box, -1.0)) for box, offsets in boxes]
    strided = torch.full((4, 12), -1.0)[:, 2:7]
    parts += [HeldPart("x", (8, 5), (4, 0), strided), HeldPart("x", (120,), (7,), torch.full((31,), -1.0))]
    parts.append(HeldPart("x", (6, 4), (6, 0), torch.empty(0, 4)))
    calls: list[None] = []
    fill_parts(parts, number_of, lambda: calls.append(None))
    for part, (box, _) in zip(parts, boxes, strict=False):
        assert torch.equal(part.local, box)
    assert torch.equal(strided, torch.arange(20.0, 40.0).view(4, 5))
    assert torch.equal(parts[5].local, torch.arange(7.0, 38.0))
    assert len(calls) > 31 // 3, "the watchdog hears of each block"


def test_a_long_draw_logs_its_progress(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(initial, "LOG_SECONDS", -1.0)
    model = nn.Linear(1000, 2000, bias=False)
    with caplog.at_level(logging.INFO):
        fill_model(model, number_of)
    assert caplog.messages[-1] == "2 of 2 million initial values are drawn"


def test_an_empty_engine_keeps_its_weights_until_they_are_drawn() -> None:
    made = trainable()
    asked: list[str] = []

    def recorded(name: str, pairs: Tensor) -> Tensor:
        asked.append(name)
        return made.initial_value(name, pairs)

    config = config_of(engine="single")
    engine = build_empty_engine(config, runtime_of(config), type(made)(made.build, recorded, made.optimizer))
    assert not asked
    engine.draw_initial_values(recorded)
    assert set(asked) == {name for name, _ in made.build().named_parameters()}


def test_threads_share_the_work_and_torch_has_its_own_threads_again() -> None:
    before = torch.get_num_threads()
    names: set[str] = set()
    together = threading.Barrier(3)

    def waits_for_two_others(name: str, pairs: Tensor) -> Tensor:
        if threading.current_thread().name not in names:
            names.add(threading.current_thread().name)
            together.wait(timeout=600)
        assert torch.get_num_threads() == 1
        return number_of(name, pairs)

    torch.set_num_threads(3)
    try:
        model = nn.Linear(1000, 1000, bias=False)
        fill_model(model, waits_for_two_others)
        assert torch.get_num_threads() == 3
        assert torch.equal(model.weight.detach().view(-1), torch.arange(1000.0 * 1000))
    finally:
        torch.set_num_threads(before)
    assert len(names) == 3


def test_an_error_in_a_thread_is_raised() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError):
            fill_model(nn.Linear(1000, 1000), lambda _, pairs: pairs / (1 // 0))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
