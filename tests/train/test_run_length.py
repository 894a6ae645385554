"""Tokens and epochs become steps when a recipe is read."""

from pathlib import Path

import pytest

from train.config_file import load_recipe, recipe_as_yaml
from train.errors import ConfigError

ROOT = Path(__file__).parents[2]
LAPTOP = ROOT / "recipes" / "laptop.yaml"
DATA = ROOT / "tests" / "earlier_version" / "data"
ROWS = 424
"""Training rows of 32 tokens in DATA."""


@pytest.mark.parametrize(
    ("length", "steps"), [("tokens=1e6", 245), ("tokens=1_003_520", 245), ("tokens=1003521", 246), ("tokens=90000", 22)]
)
def test_the_steps_process_at_least_the_tokens(length: str, steps: int, tmp_path: Path) -> None:
    recipe = load_recipe(LAPTOP, [f"train.{length}"])  # 16 x 256 tokens a step
    assert recipe.train.steps == steps
    (tmp_path / "recipe.yaml").write_text(recipe_as_yaml(recipe))
    assert load_recipe(tmp_path / "recipe.yaml") == recipe


def test_epochs_count_the_training_rows_of_all_sources() -> None:
    sources = f"data.sources=[{{path: {DATA}}}, {{path: {DATA}}}]"
    overrides = ["model.seq_len=32", "train.global_batch_size=4", "train.epochs=1.5", sources]
    assert load_recipe(LAPTOP, overrides).train.steps == -(-3 * ROWS // 4)


def test_a_length_on_the_command_line_replaces_that_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(LAPTOP.read_text().replace("  steps: 120", "  tokens: 1e6"))
    assert load_recipe(file).train.steps == 245
    assert load_recipe(file, ["train.steps=40"]).train.steps == 40
    assert load_recipe(LAPTOP, ["train.tokens=1e6"]).train.steps == 245


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.steps=9", "train.tokens=1e9"], r"train\.steps \(9\) and train\.tokens \(1e9\) both give .*remove one"),
        (["train.tokens=1", "train.epochs=2"], r"train\.tokens \(1\) and train\.epochs \(2\) both"),
        (["train.tokens=nan"], r"train\.tokens \(nan\) must be a number above 0"),
        (["train.epochs=-1"], r"train\.epochs \(-1\) must be a number above 0"),
        (["train.tokens=50000"], r"warmup_steps \(20\) must be below train\.steps \(13\)"),
        (
            ["train.tokens=1e6", "optim.lr=0"],
            r"^optim\.lr \('0'\): input should be greater than 0$",
        ),
        (["train.steps=null"], r"the setting train\.steps is missing"),
    ],
)
def test_a_length_that_is_wrong_or_given_twice_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(LAPTOP, overrides)
