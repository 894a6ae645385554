"""Shares and costs of traces that are written out here, in microseconds."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.profiling.trace import Event, Span, length, own_time, read_events, summarize, union

MAIN, OTHER, STREAM = (1, 1), (1, 2), (0, 7)


def event(name: str, category: str, start: float, end: float, thread: tuple[int, int] = MAIN) -> Event:
    return Event(name, category, thread, start, end)


def step(number: int, start: float, end: float) -> Event:
    return event(f"step {number}", "user_annotation", start, end)


def test_without_a_device_each_moment_counts_once() -> None:
    events = [
        step(4, 0, 100),
        event("phase data", "user_annotation", 0, 30),
        event("aten::copy_", "cpu_op", 20, 25),  # while data is read
        event("aten::mm", "cpu_op", 40, 60),
        event("gloo:all_reduce", "user_annotation", 50, 80, OTHER),  # hidden until 60
        event("aten::mm", "cpu_op", 190, 290),  # after the steps
    ]
    summary = summarize(events)
    assert summary.seconds == pytest.approx(100e-6)
    assert summary.shares == pytest.approx(
        {"compute": 0.25, "communication": 0.2, "data": 0.25, "host": 0.3, "bubble": 0.0}
    )
    assert [(cost.name, cost.calls) for cost in summary.costs] == [
        ("gloo:all_reduce", 1),
        ("aten::mm", 1),
        ("aten::copy_", 1),
    ]
    assert summary.costs[1].seconds == pytest.approx(20e-6)
    assert summary.costs[1].share == pytest.approx(0.2)


def test_on_a_device_its_kernels_are_what_counts() -> None:
    events = [
        step(4, 0, 100),
        event("aten::mm", "cpu_op", 0, 90),  # the host only launches
        event("sm90_gemm", "kernel", 10, 50, STREAM),
        event("Memcpy HtoD", "gpu_memcpy", 45, 60, OTHER),
        event("ncclDevKernel_AllReduce", "kernel", 40, 80, OTHER),
    ]
    summary = summarize(events)
    assert summary.shares == pytest.approx(
        {"compute": 0.5, "communication": 0.2, "data": 0.0, "host": 0.3, "bubble": 0.0}
    )
    names = [cost.name for cost in summary.costs]
    assert sorted(names) == ["Memcpy HtoD", "ncclDevKernel_AllReduce", "sm90_gemm"]


def test_a_wrapper_of_operations_computes_nothing_itself() -> None:
    events = [
        step(1, 0, 100),
        event("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 0, 100),
        event("aten::mm", "cpu_op", 20, 40),
    ]
    assert summarize(events).shares["compute"] == pytest.approx(0.2)


def test_ten_costs_are_named_and_the_largest_comes_first() -> None:
    operations = [event(f"aten::op{n:02}", "cpu_op", 100 * n, 100 * n + n) for n in range(20)]
    costs = summarize([step(1, 0, 2000), *operations]).costs
    assert [cost.name for cost in costs] == [f"aten::op{n}" for n in range(19, 9, -1)]


def test_a_trace_without_steps_has_no_shares() -> None:
    summary = summarize([event("aten::mm", "cpu_op", 0, 10)])
    assert (summary.seconds, summary.costs, set(summary.shares.values())) == (0.0, [], {0.0})


def test_own_time_is_without_what_lies_within() -> None:
    outer, inner = event("outer", "cpu_op", 0, 100), event("inner", "cpu_op", 10, 40)
    innermost, elsewhere = event("innermost", "cpu_op", 20, 30), event("elsewhere", "cpu_op", 20, 90, OTHER)
    own = {each.name: seconds for each, seconds in own_time([innermost, outer, elsewhere, inner])}
    assert own == {"outer": 70, "inner": 20, "innermost": 10, "elsewhere": 70}


def test_only_events_with_a_length_are_read() -> None:
    trace: dict[str, Any] = {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "python"}},
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 2, "ts": 5.0, "dur": 2.0},
            {"ph": "s", "id": 1, "name": "fwdbwd", "pid": 1, "tid": 2, "ts": 5.0},
        ]
    }
    assert read_events(trace) == [event("aten::mm", "cpu_op", 5.0, 7.0, (1, 2))]


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (pair[0], pair[0] + pair[1])))


@given(SPANS)
def test_a_union_covers_the_same_moments_without_overlaps(spans: list[Span]) -> None:
    merged = union(spans)
    moments = {moment for start, end in spans for moment in range(int(start), int(end))}
    assert length(merged) == len(moments)
    assert all(one[1] < two[0] for one, two in pairwise(merged))


@settings(max_examples=40)
@given(SPANS, SPANS, SPANS, SPANS)
def test_shares_agree_with_a_count_of_moments(
    steps: list[Span], compute: list[Span], communication: list[Span], data: list[Span]
) -> None:
    events = [step(number, *span) for number, span in enumerate(steps)]
    events += [event("aten::mm", "cpu_op", *span) for span in compute]
    events += [event("gloo:all_gather", "user_annotation", *span, OTHER) for span in communication]
    events += [event("phase data", "user_annotation", *span) for span in data]
    counts: dict[str, int] = dict.fromkeys(["compute", "communication", "data", "host", "bubble"], 0)
    for moment in range(100):
        if not any(start <= moment < end for start, end in steps):
            continue
        kinds = (("compute", compute), ("communication", communication), ("data", data))
        kind = next((kind for kind, spans in kinds if any(a <= moment < b for a, b in spans)), "host")
        counts[kind] += 1
    total = sum(counts.values())
    assert summarize(events).shares == pytest.approx({kind: n / total if total else 0.0 for kind, n in counts.items()})
