import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.config import ParallelConfig
from parallel.errors import LaunchError
from parallel.layout import Layout, resolve_layout

axis = st.integers(1, 6)


@given(replicate=axis, shard=axis, tensor=axis)
def test_the_open_axis_takes_the_remaining_ranks(replicate: int, shard: int, tensor: int) -> None:
    config = ParallelConfig(engine="fsdp2", replicate=replicate, tensor=tensor)
    layout = resolve_layout(config, replicate * shard * tensor)
    assert layout == Layout(replicate, shard, tensor)
    assert layout.world_size == replicate * shard * tensor


@given(replicate=axis, shard=axis, tensor=axis)
def test_each_data_parallel_rank_is_a_group_of_neighbouring_peers(replicate: int, shard: int, tensor: int) -> None:
    layout = Layout(replicate, shard, tensor)
    ranks = [layout.data_parallel_rank(rank) for rank in range(layout.world_size)]
    assert ranks == [group for group in range(layout.data_parallel_size) for _ in range(tensor)]


@given(replicate=axis, shard=axis, tensor=axis)
def test_coordinates_count_through_all_positions_with_tensor_fastest(replicate: int, shard: int, tensor: int) -> None:
    layout = Layout(replicate, shard, tensor)
    positions = itertools.product(range(replicate), range(shard), range(tensor))
    assert [layout.coordinates(rank) for rank in range(layout.world_size)] == list(positions)


@pytest.mark.parametrize("engine", ["ddp", "zero1", "zero2", "zero3"])
def test_the_other_engines_use_all_ranks(engine: str) -> None:
    layout = resolve_layout(ParallelConfig.model_validate({"engine": engine}), 6)
    assert layout == (Layout(6, 1, 1) if engine == "ddp" else Layout(1, 6, 1))


@pytest.mark.parametrize(
    ("settings", "world_size", "text"),
    [
        ({"engine": "single"}, 2, "engine single runs in one process, but 2 ranks were started; set parallel.engine"),
        ({"tensor": 4}, 6, r"world size \(6\) must be a multiple of parallel.tensor \(4\); start 4 or 8 ranks"),
        ({"replicate": 2, "shard": 3}, 8, "does not make the world size .8.; set parallel.shard to -1"),
        ({"replicate": 3}, 8, r"does not make the world size \(8\); start 6 or 9 ranks"),
        ({"replicate": 8}, 4, r"does not make the world size \(4\); start 8 ranks"),
    ],
)
def test_a_recipe_that_does_not_fit_the_ranks_is_refused(settings: dict, world_size: int, text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        resolve_layout(ParallelConfig(**settings), world_size)
