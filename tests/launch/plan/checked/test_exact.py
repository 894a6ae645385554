"""The closed form of memory is within 5 % of the bytes that are alive in a step of the real engines."""

import pytest

from launch import cli
from launch.plan.checked.exact import count_exactly
from train.config_file import load_recipe

SMALL = [
    "model.vocab_size=4096",
    "model.d_model=128",
    "model.n_heads=4",
    "model.n_layers=2",
    "model.seq_len=128",
    "train.micro_batch_size=4",
    "train.global_batch_size=32",
    "parallel.precision=fp32",
    "parallel.activation_checkpointing=none",
]
GRID = [
    (1, "parallel.engine=single"),
    (1, "parallel.engine=single parallel.activation_checkpointing=full train.global_batch_size=4"),
    (4, "parallel.engine=ddp parallel.activation_checkpointing=selective"),
    (4, "parallel.engine=ddp parallel.precision=bf16"),
    (4, "parallel.engine=fsdp2 parallel.precision=bf16 parallel.activation_checkpointing=selective"),
    (8, "parallel.engine=fsdp2 parallel.replicate=2 parallel.activation_checkpointing=full"),
    (4, "parallel.engine=fsdp2 parallel.tensor=2"),
    (4, "parallel.engine=fsdp2 model.tied_embeddings=false"),
    (4, "parallel.engine=fsdp2 parallel.reduce_every_micro_batch=false"),
    (4, "parallel.engine=fsdp2 parallel.reshard_after_forward=false"),
]


@pytest.mark.parametrize(("gpus", "settings"), GRID)
def test_the_peak_of_a_step_is_within_5_percent_of_the_closed_form(gpus, settings):
    found = count_exactly(load_recipe("recipes/laptop.yaml", [*SMALL, *settings.split()]), gpus)
    assert found.parameters[0] == pytest.approx(found.parameters[1], rel=2e-3)
    assert found.state_bytes[0] == pytest.approx(found.state_bytes[1], rel=1e-3)
    assert found.peak_bytes[0] == pytest.approx(found.peak_bytes[1], rel=0.05)
    assert found.peak_bytes[1] is not None
    assert found.peak_bytes[1] > found.state_bytes[0]


def test_recomputing_every_second_block_keeps_what_lies_between():
    half = ["parallel.activation_checkpointing=full", "parallel.checkpoint_every_k_blocks=2", "parallel.engine=single"]
    found = count_exactly(load_recipe("recipes/laptop.yaml", [*SMALL, *half]), 1)
    assert found.peak_bytes[0] == pytest.approx(found.peak_bytes[1], rel=0.05)


def test_the_command_prints_both_numbers(capsys):
    settings = [*SMALL, "parallel.engine=zero2", "parallel.precision=bf16"]
    assert cli.main(["plan", "recipes/laptop.yaml", *settings, "--gpus", "4", "--exact"]) == 0
    printed = capsys.readouterr().out
    assert "peak of a step, as on a CPU" in printed
    assert "DeepSpeed takes no step on fake tensors" in printed
