"""What is compiled after the first step is told; torch's compiler runs with its quickest backend."""

import logging
from collections.abc import Callable

import pytest
import torch

from train.records.compilation import Compiling


@pytest.fixture
def doubled() -> Callable[[torch.Tensor], torch.Tensor]:
    torch.compiler.reset()
    return torch.compile(lambda x: x * 2, backend="eager", dynamic=False)  # pyright: ignore[reportReturnType]


def test_only_the_first_step_may_compile(
    doubled: Callable[[torch.Tensor], torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    compiling, whys = Compiling(enabled=True), []
    with caplog.at_level(logging.INFO, "train.records.compilation"):
        for step, size in enumerate((3, 3, 4), start=1):
            compiling.begin()
            doubled(torch.ones(size))
            whys.append(compiling.report(step, seconds=1.5))
    assert whys[:2] == ["", ""]
    assert "expected 3, actual 4" in whys[2]
    first, again = (record.getMessage() for record in caplog.records)
    assert first == "1 graphs compiled; the first step took 1.5 s with that"
    assert again.startswith("step 3 took 1.5 s, for 1 graphs were compiled again: ")


def test_what_an_evaluation_compiles_is_not_told(doubled: Callable[[torch.Tensor], torch.Tensor]) -> None:
    compiling = Compiling(enabled=True)
    for step in (1, 2):
        compiling.begin()
        doubled(torch.ones(3))
        assert compiling.report(step, seconds=1.0) == ""
        doubled(torch.ones(4 + step))
