import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from data_pipeline.stream.stream import open_stream
from tests.data_pipeline.conftest import tokenizer  # noqa: F401 - a fixture
from tests.data_pipeline.sets import build, config, documents
from train.config_file import load_recipe
from train.start import announce

RECIPE = Path(__file__).parents[2] / "recipes" / "laptop.yaml"


@pytest.mark.parametrize(("share", "eval_every", "warns"), [(0.0, 5, True), (0.0, 0, False), (0.2, 5, False)])
def test_an_empty_validation_split_is_said_at_the_start_if_it_is_wanted(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    share: float,
    eval_every: int,
    warns: bool,
    tokenizer: Path,  # noqa: F811
) -> None:
    build(tmp_path / "set", documents(30), tokenizer, validation_share=share)
    recipe = load_recipe(RECIPE, [f"train.eval_every={eval_every}"])
    runtime = SimpleNamespace(
        world=SimpleNamespace(world_size=1), data_parallel_size=1, device=SimpleNamespace(type="cpu")
    )
    with open_stream(config(tmp_path / "set"), seq_len=32) as stream, caplog.at_level(logging.WARNING):
        announce(recipe, cast(Any, runtime), stream)
    assert ("no source has validation documents" in caplog.text) == warns
