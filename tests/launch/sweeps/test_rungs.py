"""The models of a ladder have the sizes that were asked for, and the shape of the recipe's."""

from pathlib import Path

import pytest

from launch.sweeps.rungs import model_of_size, parameters_of, read_ratios, read_sizes, rungs, tokens_of
from train.config_file import load_recipe
from train.errors import ConfigError
from train.model.flops import count_parameters

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("laptop", "0.4M,1M,3M,10M"),
        ("gpt2-124m", "10M,30M,100M"),
        ("llama-8b", "150M,500M,1B"),
        ("llama-1b", "100M,1B"),
    ],
)
def test_models_have_about_the_size_and_keep_the_recipes_ratios(name: str, sizes: str) -> None:
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    base = recipe.model
    counts: list[int] = []
    for size in read_sizes(sizes):
        model = model_of_size(recipe, size)
        assert parameters_of(model) == pytest.approx(size, rel=0.25)
        assert parameters_of(model) == pytest.approx(count_parameters(model), rel=0.01), "biases are left out"
        assert (model.head_dim, model.n_heads // model.kv_heads) == (base.head_dim, base.n_heads // base.kv_heads)
        assert model.ff_width / model.d_model == pytest.approx(base.ff_width / base.d_model, rel=0.35)
        counts.append(parameters_of(model))
    assert counts == sorted(counts)


def test_the_recipes_own_size_gives_its_own_model() -> None:
    recipe = load_recipe(RECIPES / "llama-8b.yaml")
    assert model_of_size(recipe, parameters_of(recipe.model)) == recipe.model


def test_each_run_has_its_tokens_and_the_recipes_shares_of_warm_up_and_decay(recipe: Path) -> None:
    overrides = ["optim.schedule=wsd", "optim.decay_steps=2", "train.tokens=1024", "parallel.tensor=1"]
    own = load_recipe(recipe, overrides)
    assert own.train.steps == 8
    runs = rungs(str(recipe), overrides, read_sizes("10K,40K"), [5.0, 20.0])
    assert [run.recipe.name for run in runs] == [
        f"small-ladder-{size}-x{ratio}" for size in ("10K", "40K") for ratio in (5, 20)
    ]
    for run, ratio in zip(runs, [5, 20, 5, 20], strict=True):
        steps, optim = run.recipe.train.steps, run.recipe.optim
        least = ratio * parameters_of(run.recipe.model)
        assert least <= tokens_of(run.recipe) < least + 8 * 16, "rounded up to whole steps"
        assert optim.warmup_steps == pytest.approx(steps / 2, abs=1)
        assert optim.decay_steps == pytest.approx(steps / 4, abs=1)


def test_a_size_that_no_model_has_is_refused_with_the_nearest() -> None:
    recipe = load_recipe(RECIPES / "llama-8b.yaml")
    with pytest.raises(ConfigError, match="no model like llama-8b has about 10M parameters with heads of width 128"):
        model_of_size(recipe, 10e6)


@pytest.mark.parametrize("text", ["", "1M,", "1Q", "-1M", "0", "1M,1M", "1e99B"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--sizes"):
        read_sizes(text)


@pytest.mark.parametrize("text", ["", "20,", "x", "0", "-1", "nan", "inf", "5,5"])
def test_ratios_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--tokens-per-parameter"):
        read_ratios(text)
