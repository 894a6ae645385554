"""The closed form of memory against the engines' own formulas, and against what blocks of the real model keep."""

import itertools
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from launch.plan.activations import activation_bytes, block_activation_bytes
from launch.plan.estimate import arrangement_of, shape_of
from launch.plan.memory import memory, state_bytes
from launch.plan.shapes import Arrangement
from parallel.analysis.formulas import Parameters
from parallel.analysis.formulas import state_bytes as by_engine
from parallel.config import ParallelConfig
from parallel.engines.blocks import apply_to_blocks
from parallel.layout import resolve_layout
from train.config_file import load_recipe
from train.model.attention import find_boundaries
from train.model.config import ModelConfig
from train.model.flops import count_parameters, flops_per_token
from train.model.gpt import GPT
from train.model.rope import rope_rotation

RECIPES = ["gpt2-124m", "laptop", "llama-1b", "llama-8b", "llama-70b"]


@pytest.mark.parametrize("name", RECIPES)
def test_the_shape_of_a_recipe_counts_the_parameters_and_flops_of_its_model(name):
    config = load_recipe(f"recipes/{name}.yaml").model
    shape = shape_of(config)
    assert shape.parameters == pytest.approx(count_parameters(config), rel=2e-3)  # without biases
    assert shape.flops_per_token == pytest.approx(flops_per_token(config), rel=2e-3)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("world", [2, 64])
def test_state_is_that_of_the_engines_formula(engine, precision, world):
    config = ParallelConfig(engine=engine, precision=precision)
    recipe = load_recipe("recipes/llama-1b.yaml", ["train.global_batch_size=512"])
    recipe = recipe.model_copy(update={"parallel": config})
    shape, arrangement = shape_of(recipe.model), arrangement_of(recipe, world)
    parts = state_bytes(shape, arrangement)
    whole = shape.parameters
    formula = by_engine(
        config,
        resolve_layout(config, world),
        Parameters(blocks=shape.block_parameters, outer=shape.outer_parameters, n_blocks=shape.n_layers, tables=0),
    )
    working = 0.0 if engine in ("ddp", "fsdp2") else parts["working weights"]
    if engine == "zero3":  # the formula has a bucket, which the plan counts as a buffer; and no gathered blocks
        working = arrangement.working_bytes * whole / world
        formula -= 4 * min(50_000_000, whole)
    if engine == "zero1" and precision == "fp32":
        working = 4 * whole
    counted = parts["weights"] + parts["gradients"] + parts["optimizer state"] + working
    assert counted == pytest.approx(formula, rel=0.01)


@pytest.mark.parametrize(
    ("activation", "norm", "kv_heads"), [("swiglu", "rmsnorm", 2), ("gelu", "layernorm", 8), ("swiglu", "rmsnorm", 8)]
)
@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_block_keeps_what_the_closed_form_says(activation, norm, kv_heads, mode):
    measured = [_kept_bytes(_config(layers, activation, norm, kv_heads), mode) for layers in (2, 3)]
    arrangement = Arrangement(data=1, engine="single", micro_batch_size=2, recomputation=mode)
    shape = shape_of(_config(1, activation, norm, kv_heads))
    predicted = block_activation_bytes(shape, arrangement)
    if mode == "full":
        predicted = 2 * 2 * shape.seq_len * shape.d_model  # the block's input, in 16 bits
    assert measured[1] - measured[0] == pytest.approx(predicted, rel=0.01)


def test_memory_never_grows_with_more_shards_tensor_ranks_or_stages():
    shape = shape_of(load_recipe("recipes/llama-70b.yaml").model)
    totals = [memory(shape, Arrangement(data=n, shard=n, recomputation="full")).total for n in (2, 4, 8, 16)]
    assert totals == sorted(totals, reverse=True)
    base = Arrangement(data=64, shard=64)
    for wider in ({"tensor": 2}, {"context": 2}, {"tensor": 8}, {"context": 8}):
        assert memory(shape, replace(base, **wider)).total < memory(shape, base).total, wider


def test_recomputation_keeps_less_the_more_it_recomputes():
    shape = shape_of(load_recipe("recipes/llama-8b.yaml").model)
    kept = [
        activation_bytes(shape, Arrangement(data=8, shard=8, recomputation=mode))["activations"]
        for mode in ("none", "selective", "full")
    ]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 3


def test_the_parts_add_up_and_no_part_is_negative():
    shape = shape_of(load_recipe("recipes/llama-8b.yaml").model)
    for engine, mode in itertools.product(("ddp", "fsdp2", "zero1", "zero2", "zero3"), ("none", "selective", "full")):
        found = memory(shape, Arrangement(data=64, shard=64, engine=engine, recomputation=mode))
        assert min(found.parts.values()) >= 0
        assert found.total == sum(found.parts.values())


def _config(layers: int, activation: str, norm: str, kv_heads: int) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "vocab_size": 64,
            "seq_len": 256,
            "n_layers": layers,
            "n_heads": 8,
            "n_kv_heads": kv_heads,
            "d_model": 256,
            "d_ff": 704,
            "activation": activation,
            "norm": norm,
        }
    )


def _kept_bytes(config: ModelConfig, mode: Literal["none", "full"]) -> int:
    """Bytes of all tensors that the blocks keep for a backward pass of two sequences in bf16."""
    model = GPT(config).to(torch.bfloat16)
    apply_to_blocks(model, ParallelConfig(engine="single", activation_checkpointing=mode))
    positions = torch.arange(config.seq_len).expand(2, -1)
    boundaries = find_boundaries(torch.zeros(2, config.seq_len, dtype=torch.int32))
    rotation = rope_rotation(positions, config)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    weights |= {tensor.untyped_storage().data_ptr() for tensor in rotation}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(2, config.seq_len, config.d_model, dtype=torch.bfloat16, requires_grad=True)
    alive = []  # results stay alive, so no address is used twice
    with saved_tensors_hooks(note, lambda tensor: tensor):
        for layer in model.layers.values():
            x = layer(x, boundaries, rotation)
            alive.append(x)
    return sum(kept.values())
