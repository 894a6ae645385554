"""A counter of this rank's traffic: bytes by kind of collective, counted where torch dispatches them.

A collective counts with the size of its whole tensor, in any algorithm: the result of an all-gather, the input of a
reduce-scatter, the tensor of an all-reduce or a broadcast. A ring sends (N - 1) / N of that per rank, and twice that
for an all-reduce.
"""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMESPACES = ("c10d", "_c10d_functional")
KINDS = {
    "gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "reduce_": "reduce",
}
"""Kind of collective by a part of the operation's name; the first part that occurs counts."""


class TrafficCounter(TorchDispatchMode):
    """Counts bytes and calls: `with TrafficCounter() as traffic: ...`, then `traffic.bytes["all_gather"]`.

    Groups of one rank do not count."""

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # counted when DTensor has turned it into collectives on plain tensors
        result = func(*args, **(kwargs or {}))
        if func.namespace in NAMESPACES:
            self._count(func._opname, args, result)
        return result

    def _count(self, operation: str, args: Any, result: Any) -> None:
        kind = next((kind for part, kind in KINDS.items() if part in operation), None)
        if kind is not None and _group_size(args) > 1:
            self.bytes[kind] += max(_size(part) for part in (*args, result))
            self.calls[kind] += 1


def _size(value: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _group_size(args: Any) -> int:
    """Number of ranks of the operation's group, which is among its arguments as a ProcessGroup or by name; else 2."""
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value).size()
            except RuntimeError:
                continue
        if isinstance(value, str) and value in dist.distributed_c10d._world.pg_names.values():  # pyright: ignore[reportPrivateUsage]
            return dist.distributed_c10d._resolve_process_group(value).size()  # pyright: ignore
    return 2
