"""The form of attention is recorded with a run and kept when the run resumes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.train.test_config_file import LAPTOP
from train.checkpoint.manager import SavedProgress
from train.config_file import load_recipe
from train.model.attention import AttentionChoice
from train.start import _keep_attention, trainable_of


@pytest.mark.parametrize(
    ("setting", "saved", "kept"),
    [
        ("auto", None, "sdpa"),
        ("auto", {}, "sdpa"),  # a checkpoint made before the form was recorded
        ("auto", {"attention": "products"}, "products"),
        ("auto", {"attention": "flex"}, "sdpa"),  # this device cannot
        ("sdpa", {"attention": "products"}, "sdpa"),
    ],
)
def test_a_resumed_run_keeps_its_form_unless_the_recipe_names_another(
    setting: str, saved: dict[str, Any] | None, kept: str
) -> None:
    recipe = load_recipe(LAPTOP, [f"parallel.attention={setting}"])
    choice, events = AttentionChoice("sdpa"), []
    runtime: Any = SimpleNamespace(device=torch.device("cpu"))
    record: Any = lambda kind, **values: events.append((kind, values))  # noqa: E731
    progress = None if saved is None else SavedProgress(1, 1, None, saved)
    _keep_attention(choice, recipe, runtime, progress, record)
    assert choice.form == kept
    assert events == [("attention", {"form": kept})]


@pytest.mark.parametrize(("graphs", "kept"), [("false", "flash"), ("true", "flex")])
def test_a_run_with_cuda_graphs_does_not_keep_a_form_that_waits_for_the_device(graphs: str, kept: str) -> None:
    overrides = ["parallel.engine=ddp", "parallel.activation_checkpointing=none", f"parallel.cuda_graphs={graphs}"]
    choice = AttentionChoice("flex")
    runtime: Any = SimpleNamespace(device=torch.device("cuda"))
    progress = SavedProgress(1, 1, None, {"attention": "flash"})
    _keep_attention(choice, load_recipe(LAPTOP, overrides), runtime, progress, lambda *_, **__: None)  # pyright: ignore[reportArgumentType]
    assert choice.form == kept


def test_the_model_computes_in_the_chosen_form() -> None:
    recipe = load_recipe(LAPTOP, ["model.n_layers=1"])
    choice = AttentionChoice("products")
    with torch.device("meta"):
        model = trainable_of(recipe, choice).build()
    assert model.attention is choice
