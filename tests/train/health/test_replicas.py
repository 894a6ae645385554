from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.parallel.ranks import run_ranks
from train.health import replicas
from train.health.replicas import CorruptionError, check_replicas, compare_replicas, hash_parts


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


@pytest.mark.parametrize(
    ("sizes", "placements", "hashed"),
    [
        ((1, 4), [Replicate(), Shard(0)], 0),
        ((1, 4), [Shard(0), Shard(0)], 0),
        ((2, 2), [Replicate(), Shard(0)], 4),
        ((2, 2), [Shard(0), Shard(1)], 0),
        ((4, 1), [Replicate(), Replicate()], 4),
    ],
)
def test_only_tensors_with_replicas_are_hashed(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int], placements: list[Replicate | Shard], hashed: int
) -> None:
    """Under pure sharding nothing of the weights is read or sent."""
    compared: list[int] = []

    def sums(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        compared.extend(tensor.to_local().numel() for tensor in tensors.values() if isinstance(tensor, DTensor))
        return {}

    monkeypatch.setattr(replicas, "_sums_of_parts", sums)
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        weight = DTensor.from_local(torch.ones(2, 2), mesh, placements, run_check=False)
        compare_replicas({"weight": weight}, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
    assert sum(compared) == hashed


def test_one_process_has_no_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_gather", None)
    compare_replicas({"weight": torch.ones(2)}, torch.device("cpu"))


def test_real_ranks_find_the_one_that_differs_by_one_gather() -> None:
    ranks = run_ranks("tests/train/health/replica_ranks.py", "compare", 4)
    for found in ranks:
        assert found["whole"].startswith("rank 2 holds other weights than the 3 ranks with replicas of them")
        assert found["part"].startswith("ranks 1, 3 hold different replicas of the same weights")
        assert not found["equal"]
        assert not found["no replicas"]
        assert found["gathers"] == 3, "without replicas nothing is sent"
