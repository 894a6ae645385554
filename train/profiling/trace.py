"""What a trace of `torch.profiler` shows: the largest costs, and what the time of its steps was spent on.

A trace is Chrome's JSON, which Perfetto opens: a list of events with a name, a category, a thread, and start and length
in microseconds. Everything here is pure: events in, figures out.

Each moment of the steps counts as the first of these that applies:

compute        the device computes or copies; without a device, an operation runs that is no communication
communication  a collective runs, and no computation hides it
data           the main thread is in the phase `data`, and nothing of the above goes on
host           none of the above: Python, launches, waits for the device's end

There is no pipeline, so the share of its bubble is 0.
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STEP, PHASE = "step ", "phase "
"""Beginnings of the names that the profiler gives to steps and to phases of the loop."""
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what a device does."""
ON_HOST = ("cpu_op", "user_annotation")
"""Categories of the host. Collectives of gloo are annotations."""
COLLECTIVES = ("nccl", "gloo:", "mpi:", "c10d::", "_c10d_functional", "record_param_comms")
"""Beginnings of the names of communication, on the device and on the host."""
WRAPPER = "autograd::engine::evaluate_function"
"""Beginning of the names of events that contain other operations and compute nothing themselves."""

Span = tuple[float, float]


@dataclass(frozen=True)
class Event:
    """One thing that went on in a thread or on a device, in microseconds."""

    name: str
    category: str
    thread: tuple[Any, Any]
    start: float
    end: float

    @property
    def is_collective(self) -> bool:
        """Whether it is communication."""
        return self.name.lower().startswith(COLLECTIVES)


@dataclass(frozen=True)
class Cost:
    """The events of one name in the steps of a profile."""

    name: str
    seconds: float
    """Seconds of the events themselves, without the events within them."""
    share: float
    """`seconds` divided by the time of the steps; events on several threads may add up to more than 1."""
    calls: int


@dataclass(frozen=True)
class Summary:
    """What one rank spent the steps of a profile on."""

    seconds: float
    """Time of the steps."""
    shares: dict[str, float]
    """Parts of the time: `compute`, `communication`, `data`, `host` and `bubble`, which add up to 1."""
    costs: list[Cost]
    """The largest first."""


def read_events(trace: Mapping[str, Any]) -> list[Event]:
    """Return the events of a trace that have a length."""
    return [
        Event(item["name"], item.get("cat", ""), (item["pid"], item["tid"]), item["ts"], item["ts"] + item["dur"])
        for item in trace["traceEvents"]
        if item.get("ph") == "X"
    ]


def summarize(events: Sequence[Event], largest: int = 10) -> Summary:
    """Return the shares of the steps' time and the largest costs; all 0 without steps."""
    steps = union((event.start, event.end) for event in events if _is_annotation(event, STEP))
    total = length(steps)
    if not total:
        return Summary(0.0, dict.fromkeys(("compute", "communication", "data", "host", "bubble"), 0.0), [])
    on_device = any(event.category in DEVICE for event in events)
    computing = [event for event in events if _computes(event, on_device)]
    communicating = [event for event in events if event.is_collective]
    reading = [event for event in events if _is_annotation(event, f"{PHASE}data")]
    compute = _covered(steps, computing)
    busy = _covered(steps, [*computing, *communicating])
    known = _covered(steps, [*computing, *communicating, *reading])
    parts = {
        "compute": compute,
        "communication": busy - compute,
        "data": known - busy,
        "host": total - known,
        "bubble": 0.0,
    }
    shares = {name: max(0.0, part) / total for name, part in parts.items()}
    return Summary(total / 1e6, shares, _costs(events, steps, DEVICE if on_device else ON_HOST)[:largest])


def _is_annotation(event: Event, beginning: str) -> bool:
    return event.category == "user_annotation" and event.name.startswith(beginning)


def _computes(event: Event, on_device: bool) -> bool:
    if event.is_collective or event.name.startswith(WRAPPER):
        return False
    return event.category in (DEVICE if on_device else ("cpu_op",))


def _costs(events: Sequence[Event], steps: Sequence[Span], categories: Sequence[str]) -> list[Cost]:
    """Return the costs of the events of some categories that begin in a step, by name."""
    starts, total = [start for start, _ in steps], length(steps)
    own: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for event, seconds in own_time([event for event in events if event.category in categories]):
        step = bisect(starts, event.start) - 1
        is_cost = event.category != "user_annotation" or event.is_collective
        if is_cost and step >= 0 and event.start < steps[step][1]:
            own[event.name] += seconds
            calls[event.name] += 1
    ordered = sorted(own, key=lambda name: (-own[name], name))
    return [Cost(name, own[name] / 1e6, own[name] / total, calls[name]) for name in ordered]


def own_time(events: Iterable[Event]) -> Iterator[tuple[Event, float]]:
    """Yield each event with its length without the events that lie within it on the same thread, in microseconds."""
    open_events: list[tuple[Event, float]] = []
    for event in sorted(events, key=lambda event: (str(event.thread), event.start, -event.end)):
        while open_events and not _contains(open_events[-1][0], event):
            yield open_events.pop()
        if open_events:
            parent, own = open_events.pop()
            open_events.append((parent, own - (event.end - event.start)))
        open_events.append((event, event.end - event.start))
    yield from reversed(open_events)


def _contains(outer: Event, inner: Event) -> bool:
    return outer.thread == inner.thread and inner.end <= outer.end


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the spans that cover the same moments, in order and without overlaps."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    """Return the time that spans without overlaps cover."""
    return sum(end - start for start, end in spans)


def _covered(steps: Sequence[Span], events: Iterable[Event]) -> float:
    """Return the time of the steps in which one of the events goes on."""
    spans = [(event.start, event.end) for event in events]
    return length(union(spans)) + length(steps) - length(union([*spans, *steps]))
