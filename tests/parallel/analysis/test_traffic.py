import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel.analysis.traffic import TrafficCounter


@pytest.fixture
def four_fake_ranks():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_each_kind_counts_the_whole_tensor(four_fake_ranks: dist.ProcessGroup) -> None:
    part, whole = torch.zeros(10), torch.zeros(40)
    with TrafficCounter() as traffic:
        dist.all_reduce(part)
        dist.all_gather_single(whole, part)
        dist.reduce_scatter_single(part, whole)
        dist.broadcast(part, src=0)
    assert traffic.bytes == {"all_reduce": 40, "all_gather": 160, "reduce_scatter": 160, "broadcast": 40}
    assert set(traffic.calls.values()) == {1}


def test_functional_collectives_count_the_same(four_fake_ranks: dist.ProcessGroup) -> None:
    with TrafficCounter() as traffic:
        functional.all_gather_single(torch.zeros(10), 0, four_fake_ranks).sum()
        functional.reduce_scatter_single(torch.zeros(40), "sum", 0, four_fake_ranks).sum()
        functional.all_reduce(torch.zeros(10), "sum", four_fake_ranks).sum()
    assert traffic.bytes == {"all_gather": 160, "reduce_scatter": 160, "all_reduce": 40}


def test_a_group_of_one_rank_sends_nothing(four_fake_ranks: dist.ProcessGroup) -> None:
    alone = dist.new_group([0])
    with TrafficCounter() as traffic:
        dist.all_reduce(torch.zeros(10), group=alone)
        functional.all_reduce(torch.zeros(10), "sum", alone).sum()  # pyright: ignore[reportArgumentType]
    assert not traffic.bytes
