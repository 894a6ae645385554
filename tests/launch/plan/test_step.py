"""Laws that the model of time obeys, whatever its constants are."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.plan.estimate import shape_of
from launch.plan.machine import find_machine
from launch.plan.shapes import Arrangement, Engine
from launch.plan.step import step_seconds, tokens_per_second
from train.config_file import load_recipe

SHAPE = shape_of(load_recipe("recipes/llama-8b.yaml").model)
POWERS = st.sampled_from([1, 2, 4, 8])


@st.composite
def arrangements(draw: st.DrawFn) -> Arrangement:
    """Any arrangement that the engines allow."""
    engine: Engine = draw(st.sampled_from(("ddp", "fsdp2", "zero1", "zero2", "zero3")))
    data = draw(st.sampled_from([1, 2, 8, 64, 512]))
    return Arrangement(
        data=data,
        shard=data,
        tensor=draw(POWERS),
        pipeline=draw(POWERS),
        context=draw(POWERS),
        engine=engine,
        micro_batch_size=draw(st.integers(1, 4)),
        micro_batches=draw(st.sampled_from([2, 8, 64])),
        precision=draw(st.sampled_from(["fp32", "bf16", "fp8"])),
        recomputation=draw(st.sampled_from(["none", "selective", "full"])),
    )


@settings(max_examples=40)
@given(arrangement=arrangements(), name=st.sampled_from(["h100", "b200"]))
def test_every_part_of_a_step_is_positive_and_they_add_up(arrangement, name):
    step = step_seconds(SHAPE, arrangement, find_machine(name))
    assert min(vars(step).values()) >= 0
    assert step.total == sum(vars(step).values())


@settings(max_examples=40)
@given(arrangement=arrangements(), factor=st.floats(1, 16))
def test_faster_links_never_slow_a_step(arrangement, factor):
    slow = find_machine("h100")
    fast = slow.model_copy(update={"link_gb_s": factor * slow.link_gb_s, "network_gb_s": factor * slow.network_gb_s})
    assert step_seconds(SHAPE, arrangement, fast).total <= step_seconds(SHAPE, arrangement, slow).total


@settings(max_examples=40)
@given(arrangement=arrangements())
def test_more_bytes_never_take_less_time(arrangement):
    machine = find_machine("h100")
    longer = replace(SHAPE, seq_len=2 * SHAPE.seq_len)
    deeper = replace(SHAPE, n_layers=2 * SHAPE.n_layers)
    time = step_seconds(SHAPE, arrangement, machine).total
    assert step_seconds(longer, arrangement, machine).total > time
    assert step_seconds(deeper, arrangement, machine).total > time


@settings(max_examples=40)
@given(arrangement=arrangements())
def test_twice_the_gpus_at_the_same_global_batch_never_more_than_double_the_speed(arrangement):
    machine = find_machine("h100")
    shard = 2 * arrangement.shard
    doubled = replace(arrangement, data=2 * arrangement.data, shard=shard, micro_batches=arrangement.micro_batches // 2)
    assert doubled.global_batch_size == arrangement.global_batch_size
    before, after = (tokens_per_second(SHAPE, one, machine) for one in (arrangement, doubled))
    assert after <= 2 * before * (1 + 1e-9)


def test_interleaved_stages_shorten_the_bubble():
    machine = find_machine("h100")
    plain = Arrangement(data=8, shard=8, pipeline=4, micro_batches=8)
    interleaved = replace(plain, virtual_stages=4)
    bubble, shorter = (step_seconds(SHAPE, one, machine).bubble for one in (plain, interleaved))
    assert shorter == pytest.approx(bubble / 4)
