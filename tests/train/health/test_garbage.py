"""Reference cycles are collected on the schedule, and not before."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from train.health.garbage import STEPS_BETWEEN, collect, freeze, unfreeze


class Cycle:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def normal_collection_afterwards() -> Iterator[None]:
    yield
    unfreeze()


def test_cycles_are_collected_only_at_the_scheduled_step() -> None:
    freeze()
    cycle = weakref.ref(Cycle())
    for _ in range(10_000):
        _ = [[]]  # would trigger automatic collection
    for step in range(1, STEPS_BETWEEN):
        collect(step)
        assert cycle() is not None
    collect(STEPS_BETWEEN)
    assert cycle() is None


def test_objects_that_exist_at_the_start_are_never_scanned_again() -> None:
    freeze()
    assert gc.get_freeze_count() > 0
    assert not gc.isenabled()
