import shutil
from pathlib import Path

import pytest

from train.config import Recipe
from train.errors import ConfigError
from train.health.disk_space import AVERAGE_BYTES, BYTES_PER_PARAMETER, check_space, space_needed
from train.model.flops import count_parameters


def recipe(steps: int = 1000, **checkpoint: int) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "run",
            "model": {"vocab_size": 64, "seq_len": 8, "n_layers": 1, "n_heads": 1, "d_model": 8},
            "data": {"sources": [{"path": "data"}]},
            "optim": {"lr": 1e-3, "warmup_steps": 1},
            "train": {"steps": steps, "global_batch_size": 4, "micro_batch_size": 1},
            "checkpoint": {"every": 10, **checkpoint},
        }
    )


@pytest.mark.parametrize(
    ("run", "present", "checkpoints"),
    [
        (recipe(keep_last=3), 0, 4),
        (recipe(keep_last=3), 3, 1),
        (recipe(keep_last=3, keep_best=2), 0, 6),
        (recipe(keep_last=3, keep_every=500), 0, 6),
        (recipe(steps=15, keep_last=3), 0, 3),
        (recipe(keep_last=3), 9, 1),
    ],
)
def test_the_run_needs_space_for_the_checkpoints_that_it_keeps_and_one_more(
    run: Recipe, present: int, checkpoints: int
) -> None:
    assert space_needed(run, present) == checkpoints * BYTES_PER_PARAMETER * count_parameters(run.model)


def test_an_average_of_the_weights_takes_four_more_bytes_per_parameter() -> None:
    plain = recipe()
    averaging = plain.model_copy(update={"optim": plain.optim.model_copy(update={"ema_decay": 0.999})})
    assert space_needed(averaging, 0) - space_needed(plain, 0) == 4 * AVERAGE_BYTES * count_parameters(plain.model)
    assert AVERAGE_BYTES == 4


def test_a_disk_that_is_too_small_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_space(recipe(), tmp_path / "checkpoints")
    usage = shutil.disk_usage(tmp_path)._replace(free=space_needed(recipe(), 0) - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"GiB free, but the remaining checkpoints need .* keep fewer checkpoints"):
        check_space(recipe(), tmp_path / "checkpoints")
