"""Cycles are collected when we say, and not before."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from train.health.garbage import EVERY, collect, freeze


class Knot:
    """Refers to itself."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def thawed_afterwards() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_cycles_wait_for_the_schedule_and_go_then() -> None:
    freeze()
    gone = weakref.ref(Knot())
    for _ in range(10_000):
        _ = [[]]  # would have set the collector off
    for step in range(1, EVERY):
        collect(step)
        assert gone() is not None
    collect(EVERY)
    assert gone() is None


def test_what_lives_at_the_start_is_never_looked_at_again() -> None:
    freeze()
    assert gc.get_freeze_count() > 0
    assert not gc.isenabled()
