"""A node whose links are all slow is found; its neighbours, which have one good link, are not blamed."""

import os
from collections import Counter
from typing import Any

import pytest

from launch.supervise.bandwidth import measure_links, pairs, slow_network
from tests.parallel.ranks import run_ranks


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 8, 64])
def test_each_link_of_the_ring_is_measured_once_and_no_node_twice_at_a_time(nodes: int) -> None:
    rounds = pairs(nodes)
    for of_round in rounds:
        assert max(Counter(node for pair in of_round for node in pair).values()) == 1
    links = Counter(frozenset(pair) for of_round in rounds for pair in of_round)
    assert links == {frozenset((node, (node + 1) % nodes)): 1 for node in range(nodes)}


def test_the_node_with_slow_links_is_named_and_no_other() -> None:
    links = [[10e9, 10e9] for _ in range(8)]
    links[3] = [1e9, 2e9]
    links[2][1], links[4][0] = 1e9, 2e9  # the other ends of its links
    problem = "exchanges with its neighbours run at 2.00 GB/s, 10.00 between the others"
    assert [slow_network(rank, 8, links) for rank in range(8)] == [[]] * 3 + [[problem]] + [[]] * 4


def test_few_nodes_have_no_usual_bandwidth() -> None:
    assert slow_network(0, 2, [[1.0], [1.0]]) == []


def measured(size: int) -> dict[str, Any]:
    from parallel.bootstrap import start
    from parallel.config import ParallelConfig
    from parallel.environ import read_world

    world = read_world(os.environ)
    start(ParallelConfig(engine="ddp", device="cpu"), world)
    return {"links": measure_links(world.rank, world.world_size, "cpu", size)}


def test_real_ranks_measure_both_of_their_links() -> None:
    found = run_ranks(__file__, "measured", 3, 4096)
    assert [[len(of_node) for of_node in one["links"]] for one in found] == [[2, 2, 2]] * 3
    assert all(value > 0 for of_node in found[0]["links"] for value in of_node)
    assert found[0] == found[1] == found[2]
