"""The ranking of layouts: all of them could be started, and the first is the fastest."""

import pytest

from launch.plan.estimate import Assumptions, plan_recipe
from launch.plan.machine import find_machine
from launch.plan.report import overrides
from launch.plan.search import scale_curve, search, what_would_fit
from parallel.layout import resolve_layout
from train.config_file import load_recipe

RECIPE = "recipes/llama-8b.yaml"
ASSUMED = Assumptions()


@pytest.fixture(scope="module")
def found():
    return search(load_recipe(RECIPE), 64, find_machine("h100"), ASSUMED)


def test_every_layout_fits_and_can_be_pasted_as_overrides(found):
    assert len(found) > 20
    for setting, plan in found[:10]:
        recipe = load_recipe(RECIPE, overrides(setting).split())
        layout = resolve_layout(recipe.parallel, 64)
        assert recipe.grad_accum_steps(layout.data_parallel_size) == plan.arrangement.micro_batches
        assert plan.fits


def test_the_first_layout_takes_the_fewest_days(found):
    days = [plan.days for _, plan in found]
    assert days == sorted(days)
    own = plan_recipe(load_recipe(RECIPE), 64, find_machine("h100"), ASSUMED)
    assert days[0] <= own.days or not own.fits


def test_changes_that_save_memory_are_named_with_what_they_save():
    recipe = load_recipe(RECIPE, ["parallel.activation_checkpointing=none", "train.micro_batch_size=8"])
    changes = what_would_fit(recipe, 64)
    assert {"parallel.activation_checkpointing": "full"} in [setting for setting, _ in changes]
    assert [saved for _, saved in changes] == sorted((saved for _, saved in changes), reverse=True)
    assert len(changes) <= 3


def test_more_gpus_take_fewer_days_along_the_curve():
    curve = scale_curve(load_recipe(RECIPE), find_machine("h100"), ASSUMED, tokens=1e12)
    assert [gpus for gpus, _ in curve][:4] == [8, 16, 32, 64]
    days = [plan.days for _, plan in curve]
    assert days == sorted(days, reverse=True)
