"""One rank of the world of each recipe, simulated in this process."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from launch.fake_world import describe, lines_about, run_fake_world
from parallel.analysis.fake_world import describe_rank
from parallel.errors import LaunchError
from tests.parallel.engine_trial import LOSS, config_of, micro_batches, trainable
from tests.parallel.ranks import ROOT
from train.config_file import load_recipe

RECIPES = ROOT / "recipes"
WORLDS = {"laptop": (4, 1), "gpt2-124m": (8, 5), "llama-1b": (128, 3), "llama-8b": (512, 13), "llama-70b": (1024, 513)}


IN_FP8: dict[str, Any] = {"engine": "fsdp2", "precision": "fp8", "compile": True, "fp8_scaling": "tensorwise"}
"""The engine that gathers the matrices of blocks in fp8. Norms, in 16 bits, count little in a wide model."""


def fake(world_size: int, rank: int = 0, model: dict[str, Any] | None = None, **settings: Any):
    def batches(runtime: Any) -> list[Any]:
        return micro_batches(0, runtime, number=2)[0]

    config = config_of(**settings)
    return describe_rank(
        config, trainable(**(model or {})), world_size=world_size, rank=rank, micro_batches=batches, loss_fn=LOSS
    )


def test_every_recipe_has_a_world_in_this_file() -> None:
    assert {path.stem for path in RECIPES.glob("*.yaml")} == WORLDS.keys()


@pytest.mark.parametrize("name", WORLDS)
def test_each_recipe_holds_and_sends_on_a_fake_rank_what_the_formulas_say(name: str) -> None:
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    world_size, rank = WORLDS[name]
    found = describe(recipe, world_size, rank)
    assert found.layout.world_size == world_size
    assert found.counted_state_bytes == pytest.approx(found.state_bytes, rel=1e-3)
    assert found.counted_traffic is not None
    if recipe.parallel.tensor == 1:
        assert found.counted_traffic == pytest.approx(found.traffic, rel=1e-3)
    else:
        assert all(found.counted_traffic[kind] > size for kind, size in found.traffic.items())
    text = "\n".join(lines_about(recipe, found, rank))
    assert f"rank {rank} of {world_size}" in text
    assert f"{found.parameters:,}" in text
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "settings",
    [
        {"engine": "fsdp2", "replicate": 2},
        {"engine": "fsdp2", "reshard_after_forward": False},
        {"engine": "fsdp2", "reduce_every_micro_batch": False, "activation_checkpointing": "selective"},
        {"engine": "fsdp2", "replicate": 2, "model": {"tied_embeddings": False}},
        {"engine": "fsdp2", "reduce_every_micro_batch": False, "model": {"tied_embeddings": False}},
        {"engine": "ddp", "precision": "bf16"},
        {**IN_FP8, "replicate": 2, "model": {"d_model": 512}},
    ],
)
def test_a_fake_step_sends_what_the_formula_says(settings: dict[str, Any]) -> None:
    found = fake(4, rank=2, **settings)
    assert found.counted_traffic is not None
    large = {kind: size for kind, size in found.counted_traffic.items() if size > 1024}  # leaves out the scales of fp8
    assert large == pytest.approx(found.traffic, rel=1e-3)
    assert found.counted_state_bytes == pytest.approx(found.state_bytes, rel=1e-3)


def test_gathers_in_fp8_send_half_of_what_those_in_bf16_send_for_blocks() -> None:
    model = {"d_model": 512}
    narrow = fake(4, model=model, engine="fsdp2", precision="bf16").counted_traffic
    narrower = fake(4, model=model, **IN_FP8).counted_traffic
    by_rows = fake(4, model=model, **{**IN_FP8, "fp8_scaling": "rowwise"}).counted_traffic
    assert narrow is not None
    assert narrower is not None
    assert narrower["all_gather"] == pytest.approx(0.51 * narrow["all_gather"], rel=0.02)
    assert narrower["reduce_scatter"] == narrow["reduce_scatter"]
    assert not narrower["all_reduce"]  # the scales are exchanged before the passes, not with each matrix in them
    assert by_rows == narrow


def test_a_rank_has_a_position_on_each_axis() -> None:
    found = fake(8, rank=5, engine="fsdp2", replicate=2, tensor=2)
    assert found.coordinates == (1, 0, 1)


def test_zero_is_described_only_by_its_formulas() -> None:
    found = fake(8, engine="zero3", precision="bf16")
    assert found.counted_traffic is None
    assert found.counted_state_bytes is None
    assert found.held_parameters == found.parameters // 8


def test_a_rank_outside_of_its_world_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"--fake-rank \(8\) must be at least 0 and below --fake-world \(8\)"):
        fake(8, rank=8, engine="fsdp2")


def test_the_command_prints_its_results(capsys: pytest.CaptureFixture[str]) -> None:
    recipe: Path = RECIPES / "laptop.yaml"
    assert run_fake_world(recipe, ["parallel.engine=zero2", "parallel.reshard_after_forward=true"], 4, 3) == 0
    printed = capsys.readouterr().out
    assert "rank 3 of 4, engine zero2" in printed
    assert "DeepSpeed takes no step on fake tensors" in printed
