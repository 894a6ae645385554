"""The readers of long logs give what the readers of single records give, whatever the lines are."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.inspect import blocks, sampled_events
from launch.inspect.sampled_curve import sampled_curve
from launch.inspect.sampled_events import digest_events
from train.records.curve import curve_of
from train.records.events import read_events
from train.records.goodput import account
from train.records.jsonl import last_record, read_jsonl
from train.run_folder import RunFolder


def step(number: int, loss: float, attempt: int = 1, norm: float = 1.0) -> dict[str, Any]:
    return {
        "time": 1e9 + number, "step": number, "loss": loss, "lr": 1e-3, "grad_norm": norm, "tokens": 8 * number,
        "data_step": number, "tokens_per_second": 5.5, "uptime": 2.5, "attempt": attempt,
    }  # fmt: skip


def write(path: Path, records: Sequence[dict[str, Any] | bytes]) -> Path:
    lines = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in records]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes records lie in many blocks."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 700)


def test_each_pixel_keeps_its_last_step_its_extremes_and_the_highest_norm(tmp_path: Path, small_blocks: None) -> None:
    rng = random.Random(3)
    losses = [rng.uniform(2, 3) for _ in range(1000)]
    norms = [rng.uniform(0, 1) for _ in range(1000)]
    losses[444], norms[445] = 9.0, 77.0
    records = [step(n + 1, losses[n], norm=norms[n]) for n in range(1000)]
    curve = sampled_curve(write(tmp_path / "metrics.jsonl", records), pixels=10)
    assert (curve.kept, curve.replaced) == (1000, 0)
    assert len(curve.steps) <= 40
    for pixel in range(10):
        here = [one for one in records if one["step"] * 10 // 1001 == pixel]
        drawn = [one for one in curve.steps if one["step"] * 10 // 1001 == pixel]
        assert here[-1] == drawn[-1]
        for name, extreme in (("loss", max), ("loss", min), ("grad_norm", max)):
            assert extreme(here, key=lambda one: one[name]) in drawn
    assert [one["step"] for one in curve.steps] == sorted(one["step"] for one in curve.steps)


def test_steps_that_a_later_attempt_repeats_are_replaced_and_lost_ones_are_gone(
    tmp_path: Path, small_blocks: None
) -> None:
    first = [step(n, 9.0) for n in range(1, 41)]
    second = [step(n, 2.0, attempt=2) for n in range(31, 36)]
    mark = [{"time": 1e9, "step": n, "validation_loss": 3.0} for n in (30, 40)]
    curve = sampled_curve(write(tmp_path / "metrics.jsonl", [*first[:30], mark[0], *first[30:], mark[1], *second]))
    assert [(one["step"], one["attempt"]) for one in curve.steps] == [(n, 1 + (n > 30)) for n in range(1, 36)]
    assert curve.replaced == 10
    assert [one["step"] for one in curve.evaluations] == [30], "step 40 was lost with its evaluation"


def test_all_evaluations_of_a_short_run_are_kept(tmp_path: Path) -> None:
    marks = [{"time": 1e9, "step": n, "validation_loss": 3.0, "task/a": 0.5} for n in range(10, 101, 10)]
    records = [one for n in range(1, 101) for one in (step(n, 3.0), *(m for m in marks if m["step"] == n))]
    assert sampled_curve(write(tmp_path / "metrics.jsonl", records)).evaluations == marks


LINES = [
    b"",
    b"null",
    b"\xff\xfe",
    b'{"time": 1e9, "step": 7, "loss": 3.0',
    b'{"time": 1e9, "step": 2, "loss": 3.0, "lr": 1.0, "grad_norm": 1.0, "tokens": "many"}',
    b'{"time": 1e9, "step": 002, "loss": 3.0, "lr": 1.0, "grad_norm": 1.0, "attempt": 1}',
    b'{"time": 1e9, "step": -2, "loss": 3.0, "lr": 1.0, "grad_norm": 1.0, "attempt": 1}',
    b'{"time": 1e9, "step": 2, "loss": "low", "lr": 1.0, "grad_norm": 1.0, "attempt": 1}',
    b'{"time": 1e9, "step": 99999999999999999999999, "loss": 3.0, "lr": 1.0, "grad_norm": 1.0, "attempt": 1}',
    b'{"step": 3, "loss": 2.5}',
    b'{"step": 5, "data_step": 6}',
    b'{"step": 4, "validation_loss": 2.5}',
    b'{"kind": "saved", "time": 1e9, "uptime": 1.0, "step": 7}',
    b'{"kind": "saved", "time": 1e9, "uptime": 1.0, "step": 07}',
    b'{"kind": "failed", "time": 1e9, "uptime": 1.0, "exit_code": 100}',
    b'{"kind": "failed", "time": 1e9, "uptime": 1.0, "exit_code": 999}',
    b'{"kind": "spike", "time": 1e9, "uptime": 99999999999.0, "step": 3}',
    b'{"kind": "spike", "time": 1e9, "uptime": 999999999999.0, "step": 3}',
    b'{"kind": "stopped", "time": 1e9, "uptime": 4.0, "seconds": {"step": 1.0}}',
    b'{"kind": "sta\\ud83drted", "time": 1e9, "uptime": 1.0}',
]
STEPS = st.builds(
    step, st.integers(1, 12), st.sampled_from([3.0, 2.5, float("nan"), float("inf"), 1e-5]), st.integers(1, 3)
)
EVENTS = st.one_of(
    st.builds(
        lambda attempt, time: {
            "time": 1e9 + time, "uptime": 1.0, "kind": "started", "attempt": attempt, "previous": None,
        },
        st.integers(1, 3),
        st.integers(0, 99),
    ),
    st.builds(
        lambda kind, step, uptime: {
            "time": 1e9 + uptime, "uptime": uptime, "kind": kind, "step": step, "seconds": {"step": 1.0},
        },
        st.sampled_from(["booked", "finished", "saved", "resumed", "spike"]),
        st.integers(0, 9),
        st.floats(0, 50),
    ),
    st.just({"time": 1e9, "uptime": 0.25, "kind": "stop_requested"}),  # another process, whose clock is its own
)  # fmt: skip


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(st.one_of(STEPS, st.sampled_from(LINES)), max_size=25), st.sampled_from([b"", b"\n"]))
def test_any_metrics_give_the_curve_of_their_records(
    tmp_path_factory: pytest.TempPathFactory, records: list[Any], end: bytes
) -> None:
    path = write(tmp_path_factory.getbasetemp() / "metrics.jsonl", records)
    path.write_bytes(path.read_bytes().rstrip(b"\n") + end)
    wanted = curve_of(read_jsonl(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", 300)
        curve = sampled_curve(path, pixels=100_000)
    drawn = {one["step"]: one for one in curve.steps}
    for number, one in wanted.items():
        assert repr(drawn.pop(number)) == repr({name: one[name] for name in drawn_names(one)})
    assert not drawn


def drawn_names(record: dict[str, Any]) -> list[str]:
    return [name for name in record if name != "validation_loss"]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(st.one_of(EVENTS, st.sampled_from(LINES)), max_size=25), st.sampled_from([b"", b"\n"]))
def test_any_events_give_the_account_and_the_numbers_of_their_records(
    tmp_path_factory: pytest.TempPathFactory, records: list[Any], end: bytes
) -> None:
    run = RunFolder(tmp_path_factory.getbasetemp())
    clock = (
        (one | {"uptime": one["uptime"] + 50 * n} if "step" in one else one)
        for n, one in enumerate(one for one in records if isinstance(one, dict))
    )
    path = write(run.events, [one if isinstance(one, bytes) else next(clock) for one in records])
    path.write_bytes(path.read_bytes().rstrip(b"\n") + end)
    run.metrics.unlink(missing_ok=True)
    wanted = list(read_events(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", 300)
        digest = digest_events(run)
    assert digest.counts == Counter(one["kind"] for one in wanted)
    assert digest.spent == account(wanted, last_record(run.metrics, "attempt"))
    assert digest.events == [one for one in wanted if one["kind"] != "booked"]


def test_of_many_events_of_one_kind_some_are_kept_and_all_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_blocks: None
) -> None:
    monkeypatch.setattr(sampled_events, "DRAWN", 10)
    spikes = [{"time": 1e9 + n, "uptime": 1.0, "kind": "spike", "step": n} for n in range(100)]
    hang = {"time": 1e9 + 50, "uptime": 1.0, "kind": "hang", "rank": 3}
    write(tmp_path / "events.jsonl", [*spikes[:50], hang, *spikes[50:]])
    digest = digest_events(RunFolder(tmp_path))
    assert digest.counts == {"spike": 100, "hang": 1}
    steps = [one["step"] for one in digest.events if one["kind"] == "spike"]
    assert 5 <= len(steps) <= 10
    assert len({b - a for a, b in pairwise(steps)}) == 1, "evenly spread over all blocks"
    assert hang in digest.events


def test_lines_that_are_no_records_are_counted_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "metrics.jsonl", [b"[]", step(1, 3.0), b'{"torn'])
    assert sampled_curve(tmp_path / "metrics.jsonl").kept == 1
    assert caplog.messages == [f"{tmp_path / 'metrics.jsonl'}: lines that are no records were skipped: 2"]


def test_a_file_without_records_gives_an_empty_curve(tmp_path: Path) -> None:
    assert sampled_curve(tmp_path / "none.jsonl").steps == []
    with (tmp_path / "zeros.jsonl").open("wb") as file:
        file.truncate(1 << 38)  # 256 GiB of nothing, which no reader could get through
    assert sampled_curve(tmp_path / "zeros.jsonl").kept == 0
