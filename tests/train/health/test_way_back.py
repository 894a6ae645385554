"""The checkpoint that a diverged run is sent back to is from before its losses went bad."""

import json
import math
from pathlib import Path

import pytest

from train.config import Recipe
from train.health.way_back import last_good_step, way_back


def curve(*losses: float, norm: float = 1.0) -> dict[int, dict[str, float]]:
    return {step: {"step": step, "loss": loss, "grad_norm": norm} for step, loss in enumerate(losses, start=1)}


GOOD = (6.2, 6.0, 5.5, 5.1, 4.8, 4.9, 4.7, 4.8)


@pytest.mark.parametrize(
    ("losses", "saved", "expected"),
    [
        ((*GOOD, 4.8), (2, 4, 6, 8), 8),
        ((*GOOD, 9.0, 30.0), (2, 4, 6, 8, 10), 6),  # the loss of step 9 shows the weights of step 8
        ((*GOOD, 6.2, 6.2), (2, 4, 6, 8, 10), 6),
        (GOOD, (4, 8), 4),  # nothing is known of the weights after the last step
        ((*GOOD, math.nan), (4, 8), 4),
        ((6.2, 7.0, 9.0, 20.0), (2, 4), None),
        ((6.2, 6.1, 6.2, 6.2), (), None),
        ((), (1,), None),
    ],
)
def test_the_last_checkpoint_with_good_losses_after_it(
    losses: tuple[float, ...], saved: tuple[int, ...], expected: int | None
) -> None:
    assert last_good_step(curve(*losses), saved) == expected


def test_steps_without_a_gradient_are_not_good() -> None:
    records = curve(*GOOD) | {9: {"step": 9, "loss": 4.7, "grad_norm": 0.0}}
    assert last_good_step(records, (4, 6, 8)) == 6


def test_the_advice_names_the_checkpoint_and_two_commands(tmp_path: Path) -> None:
    recipe = Recipe.model_validate(
        {
            "name": "big",
            "runs_dir": str(tmp_path),
            "model": {"vocab_size": 64, "seq_len": 8, "n_layers": 1, "n_heads": 1, "d_model": 8},
            "data": {"sources": [{"path": "data"}]},
            "optim": {"lr": 1e-3, "warmup_steps": 1},
            "train": {"steps": 100, "global_batch_size": 4, "micro_batch_size": 1},
        }
    )
    assert way_back(recipe) == (
        "No checkpoint is from before the losses went bad: start a new run with a lower rate, such as optim.lr=0.0005"
    )
    for step in (4, 8):
        (tmp_path / f"big/checkpoints/step-{step:08d}").mkdir(parents=True)
    lines = (json.dumps(record) for record in curve(*GOOD).values())
    (tmp_path / "big/metrics.jsonl").write_text("\n".join(lines))
    run = tmp_path / "big"
    assert way_back(recipe) == (
        "Step 4 is the last checkpoint before the losses went bad; to continue from it in a new run: "
        f"`keepstep checkpoint copy {run}/checkpoints/step-00000004 {tmp_path}/big-from-4/checkpoints`, then "
        f"`keepstep run {run}/recipe.yaml name=big-from-4 optim.lr=0.0005 --allow schedule`"
    )
