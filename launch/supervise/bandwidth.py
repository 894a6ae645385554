"""The bandwidth between neighbouring nodes, for the health check of Slurm jobs.

A collective over all nodes runs at the speed of its slowest link and does not say which. So each node exchanges data
with its neighbour on either side. A node is slow if both of its links are.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

BYTES = 1 << 26
"""Bytes that two nodes exchange in one measurement."""
TRIES = 4
SHARE = 0.5
"""A link is slow below this share of the median link's bandwidth."""
FEWEST_NODES = 4
"""Nodes below which no median shows what is usual."""


def pairs(nodes: int) -> list[list[tuple[int, int]]]:
    """Return two rounds of pairs of neighbours, so that each node is in one pair of a round at most."""
    ring = [(node, (node + 1) % nodes) for node in range(nodes if nodes > 2 else nodes - 1)]
    rounds = [ring[0::2], ring[1::2]]
    if nodes % 2 and nodes > 2:  # the last pair would share a node with the first
        rounds = [rounds[0][:-1], rounds[1], rounds[0][-1:]]
    return [pairs_of_round for pairs_of_round in rounds if pairs_of_round]


def measure_links(rank: int, nodes: int, device: str, size: int = BYTES) -> list[list[float]]:
    """Return the bytes per second of each node's links, on every node. Collective.

    Both ends of a link send and receive at the same time, as in a ring all-gather or reduce-scatter."""
    import torch
    import torch.distributed as dist

    own: list[float] = []
    out, received = (
        torch.ones(size, dtype=torch.uint8, device=device),
        torch.empty(size, dtype=torch.uint8, device=device),
    )
    for pairs_of_round in pairs(nodes):
        pair = next((pair for pair in pairs_of_round if rank in pair), None)
        if pair is not None:
            peer = sum(pair) - rank
            own.append(size / _best_seconds(out, received, peer))
    everyone: list[list[float]] = [[] for _ in range(nodes)]
    dist.all_gather_object(everyone, own)
    return everyone


def _best_seconds(out: Any, received: Any, peer: int) -> float:
    """Return the shortest time of several exchanges with a peer; the first connects."""
    import torch.distributed as dist

    best = float("inf")
    for _ in range(TRIES):
        start = time.perf_counter()
        both = [dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, received, peer)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        received[0].item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return best


def slow_network(rank: int, nodes: int, links: Sequence[Sequence[float]]) -> list[str]:
    """Return the problem of this node if all of its links are slow. `links`: see `measure_links`."""
    if nodes < FEWEST_NODES:
        return []
    usual = statistics.median(value for of_node in links for value in of_node)
    own = max(links[rank], default=usual)
    if own >= SHARE * usual:
        return []
    return [f"exchanges with its neighbours run at {own / 1e9:.2f} GB/s, {usual / 1e9:.2f} between the others"]
