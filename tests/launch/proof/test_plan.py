"""What a proof runs: a short recipe, drawn faults, other layouts."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.proof.plan import KINDS, draw_faults, few_steps, parse_layout
from train.config import Recipe
from train.errors import ConfigError
from train.health.injected_faults import NAMES


def recipe(**optim: object) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "long",
            "model": {"vocab_size": 64, "seq_len": 8, "n_layers": 1, "n_heads": 1, "d_model": 8},
            "data": {"sources": [{"path": "data"}]},
            "optim": {"lr": 1e-3, **optim},
            "train": {"steps": 100_000, "global_batch_size": 4, "micro_batch_size": 1},
        }
    )


@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(8, 60))
def test_faults_are_drawn_within_the_run_and_where_they_can_be_injected(seed: int, ranks: int, steps: int) -> None:
    every = steps // 4
    faults = draw_faults(KINDS, ranks, steps, every, random.Random(seed))
    assert faults == draw_faults(KINDS, ranks, steps, every, random.Random(seed))
    for fault in faults:
        assert fault["fault"] in NAMES
        assert 0 <= fault["rank"] < ranks
        assert 1 <= fault["step"] < steps
        if fault["phase"] == "save":
            assert fault["step"] % every == 0
        if fault["fault"].endswith("shard"):
            assert fault["step"] > 3 * every, "two checkpoints are complete"
    assert sum(fault["fault"] == "kill" for fault in faults) == 1 + ranks


def test_an_unknown_kind_of_fault_is_refused() -> None:
    with pytest.raises(ConfigError, match="--faults: flood is not one of rank, group, save, torn, stop"):
        draw_faults(["flood"], 2, 12, 3, random.Random(0))


def test_a_long_recipe_is_shortened_to_a_few_steps() -> None:
    overrides = few_steps(recipe(warmup_steps=2000), 12, 3)
    assert "train.steps=12" in overrides
    assert "optim.warmup_steps=6" in overrides
    assert not [override for override in overrides if override.startswith("optim.decay_steps")]
    assert "optim.decay_steps=3" in few_steps(recipe(schedule="wsd", decay_steps=5000), 12, 3)


def test_layouts_are_engine_and_ranks() -> None:
    assert parse_layout("zero3:4") == ("zero3", 4)
    for wrong in ("ddp", "ddp:", "ddp:0", "ddp:x"):
        with pytest.raises(ConfigError, match=f"--also {wrong} must be ENGINE:RANKS"):
            parse_layout(wrong)
