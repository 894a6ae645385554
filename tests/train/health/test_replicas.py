from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from train.health.replicas import CorruptionError, check_replicas, hash_parts


@given(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), st.integers(0, 11), st.integers(0, 15))
def test_any_flipped_bit_changes_the_hash(dtype: torch.dtype, element: int, bit: int) -> None:
    tensor = torch.arange(12, dtype=dtype).reshape(3, 4)
    before = hash_parts({"weight": tensor})
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    flat = tensor.view(-1)[element : element + 1].view(integers)
    flat.bitwise_xor_(torch.tensor(1 << bit if bit < 15 else -(1 << 15), dtype=integers))
    assert hash_parts({"weight": tensor}) != before


def test_equal_tensors_have_equal_hashes_and_their_order_matters() -> None:
    one, two = torch.randn(5, 7), torch.randn(3)
    assert hash_parts({"a": one, "b": two}) == hash_parts({"a": one.clone(), "b": two.clone()})
    assert hash_parts({"a": one, "b": two}) != hash_parts({"a": two, "b": one})


def test_scalars_and_transposed_tensors_are_hashed() -> None:
    step = torch.tensor(3.0)
    assert hash_parts({"step": step}) != hash_parts({"step": step + 1})
    matrix = torch.randn(4, 3)
    assert hash_parts({"w": matrix.t()}) == hash_parts({"w": matrix.t().contiguous()})


def test_equal_replicas_pass_and_each_part_is_compared_only_with_its_replicas() -> None:
    check_replicas([{"": 1}, {"": 1}])
    check_replicas([{"shard=0": 1}, {"shard=1": 2}])
    check_replicas([{"shard=0": 1}, {"shard=1": 2}, {"shard=0": 1}, {"shard=1": 2}])
    check_replicas([{}, {}])


def test_the_rank_that_differs_from_the_majority_is_named() -> None:
    with pytest.raises(CorruptionError, match="rank 2 holds other weights than the 3 ranks with replicas"):
        check_replicas([{"": 5}, {"": 5}, {"": 6}, {"": 5}])


def test_two_replicas_that_differ_are_both_named() -> None:
    hashes_by_rank: list[Mapping[str, int]] = [{"shard=0": 1}, {"shard=1": 2}, {"shard=0": 1}, {"shard=1": 3}]
    with pytest.raises(CorruptionError, match=r"ranks 1, 3 hold different replicas .*, and no majority"):
        check_replicas([dict(hashes) for hashes in hashes_by_rank])


def test_the_placements_decide_what_is_a_replica() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))  # rank 3 is at (1, 1)
        local = torch.ones(2, 2)
        sharded = DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)
        replicated = DTensor.from_local(local, mesh, [Replicate(), Replicate()], run_check=False)
        assert set(hash_parts({"a": sharded, "b": replicated, "c": local})) == {"shard=1", ""}
    finally:
        dist.destroy_process_group()
