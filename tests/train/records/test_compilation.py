"""Compilation after the first step is reported. Torch's compiler runs with its fastest backend."""

import logging
from collections.abc import Callable

import pytest
import torch

from train.records.compilation import CompilationMonitor


@pytest.fixture
def doubled() -> Callable[[torch.Tensor], torch.Tensor]:
    torch.compiler.reset()
    return torch.compile(lambda x: x * 2, backend="eager", dynamic=False)  # pyright: ignore[reportReturnType]


def test_only_the_first_step_may_compile(
    doubled: Callable[[torch.Tensor], torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    monitor, whys = CompilationMonitor(enabled=True), []
    with caplog.at_level(logging.INFO, "train.records.compilation"):
        for step, size in enumerate((3, 3, 4), start=1):
            monitor.begin()
            doubled(torch.ones(size))
            whys.append(monitor.report(step, seconds=1.5))
    assert whys[:2] == ["", ""]
    assert "expected 3, actual 4" in whys[2]
    first, again = (record.getMessage() for record in caplog.records)
    assert first == "1 graphs compiled; the first step took 1.5 s with compilation"
    assert again.startswith("step 3 took 1.5 s because 1 graphs were compiled again: ")


def test_what_an_evaluation_compiles_is_not_reported(doubled: Callable[[torch.Tensor], torch.Tensor]) -> None:
    monitor = CompilationMonitor(enabled=True)
    for step in (1, 2):
        monitor.begin()
        doubled(torch.ones(3))
        assert monitor.report(step, seconds=1.0) == ""
        doubled(torch.ones(4 + step))
