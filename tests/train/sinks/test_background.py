"""A sink that fails or hangs costs the run nothing but a warning."""

import logging
import threading
import time
from collections.abc import Iterator

import pytest

from train.sinks.background import BackgroundSink, Sinks
from train.sinks.sink import Figures


class Kept:
    """A sink that keeps what it gets; `on_log` may raise or wait."""

    def __init__(self, lacks_from: int | None = None) -> None:
        self.lacks_from = lacks_from
        self.got: list[tuple[int, Figures]] = []
        self.closed = False

    def log(self, step: int, figures: Figures) -> None:
        self.got.append((step, figures))

    def close(self) -> None:
        self.closed = True


class Failing(Kept):
    def log(self, step: int, figures: Figures) -> None:
        super().log(step, figures)
        raise ConnectionError("the server\nis away")


class Hanging(Kept):
    def __init__(self, let_go: threading.Event) -> None:
        super().__init__()
        self.let_go, self.hangs = let_go, threading.Event()

    def log(self, step: int, figures: Figures) -> None:
        self.hangs.set()
        self.let_go.wait()
        super().log(step, figures)


@pytest.fixture
def let_go() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_sink_gets_every_record_in_order_and_is_closed() -> None:
    kept = Kept()
    sinks = Sinks([BackgroundSink("kept", (), lambda: kept)])
    for step in range(300):
        sinks.log(step, {"train/loss": float(step)})
    sinks.close()
    assert kept.got == [(step, {"train/loss": float(step)}) for step in range(300)]
    assert kept.closed


def test_a_sink_starts_with_its_first_record() -> None:
    built: list[Kept] = []
    Sinks([BackgroundSink("kept", (), lambda: built.append(Kept()) or built[0])]).close()
    assert not built


def test_a_sink_first_gets_what_it_lacks_of_earlier_attempts() -> None:
    kept = Kept(lacks_from=3)

    def history(step: int) -> list[tuple[int, Figures]]:
        return [(number, {}) for number in range(step, 6)]

    sinks = Sinks([BackgroundSink("kept", (), lambda: kept, history)])
    sinks.log(6, {})
    sinks.close()
    assert [step for step, _ in kept.got] == [3, 4, 5, 6]


def test_a_sink_that_fails_is_off_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    kept, failing = Kept(), Failing()
    failing_sink = BackgroundSink("failing", (), lambda: failing)
    sinks = Sinks([failing_sink, BackgroundSink("kept", (), lambda: kept)])
    sinks.log(1, {})
    failing_sink.join(time.monotonic() + 600)
    sinks.log(2, {})
    sinks.close()
    assert [step for step, _ in kept.got] == [1, 2]
    assert [step for step, _ in failing.got] == [1]
    assert not failing.closed
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning == (
        "the sink failing has a problem: ConnectionError: the server is away; it is off until the next start; "
        "metrics.jsonl has all steps"
    )


def test_a_sink_that_cannot_be_built_is_off(caplog: pytest.LogCaptureFixture) -> None:
    sinks = Sinks([BackgroundSink("gone", ("no_such_library",), Kept)])
    sinks.log(1, {})
    sinks.close()
    assert "the sink gone has a problem: ModuleNotFoundError: No module named 'no_such_library'" in caplog.text


def test_a_sink_that_hangs_slows_nobody(caplog: pytest.LogCaptureFixture, let_go: threading.Event) -> None:
    kept, hanging = Kept(), Hanging(let_go)
    sinks = Sinks([BackgroundSink("slow", (), lambda: hanging, waiting=3), BackgroundSink("kept", (), lambda: kept)])
    sinks.log(0, {})
    assert hanging.hangs.wait(600)
    for step in range(1, 50):  # would wait for ever if the queue had no end
        sinks.log(step, {})
    sinks.close(seconds=0.2)
    assert not hanging.got
    assert caplog.text.count("the sink slow has a problem") == 1
    assert "it does not keep up" in caplog.text
    let_go.set()


def test_the_end_of_a_run_does_not_wait_for_a_sink_that_hangs(
    caplog: pytest.LogCaptureFixture, let_go: threading.Event
) -> None:
    hanging = Hanging(let_go)
    sinks = Sinks([BackgroundSink("slow", (), lambda: hanging)])
    sinks.log(0, {})
    sinks.close(seconds=0.2)
    assert "it hangs, so its last steps may be missing there" in caplog.text
