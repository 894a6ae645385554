"""A counter of the bytes that tensors hold at the same time, counted where torch dispatches operations.

It also works on fake tensors, which have sizes but no elements. So a step of a large model can be counted on any
machine. Storages that engines empty and fill again (`resize_`) count with their current size.
"""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts live bytes: `with LiveBytes(tensors) as live: ...`, then `live.peak`.

    `tensors`: those that exist at the start. Others count from the first operation that takes or returns them."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._sizes: dict[int, int] = {}
        self.now = self.peak = 0
        for tensor in tensors:
            self._note(tensor.untyped_storage())
        self.start = self.now

    def __enter__(self) -> "LiveBytes":
        self._resize = UntypedStorage.resize_
        UntypedStorage.resize_ = self._resized  # pyright: ignore[reportAttributeAccessIssue]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        UntypedStorage.resize_ = self._resize
        super().__exit__(*error)  # pyright: ignore[reportUnknownMemberType]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # counted when DTensor has turned it into operations on plain tensors
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, result)):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage())
        return result

    @property
    def _resized(self) -> Any:
        """Replaces `UntypedStorage.resize_`, which torch does not dispatch."""

        def resize(storage: UntypedStorage, size: int) -> UntypedStorage:
            self._resize(storage, size)
            if id(storage) in self._sizes:
                self._set(id(storage), storage.nbytes())
            return storage

        return resize

    def _note(self, storage: UntypedStorage) -> None:
        key = id(storage)
        if key not in self._sizes:
            self._sizes[key] = 0
            self._set(key, storage.nbytes())
            weakref.finalize(storage, self._forget, key)

    def _set(self, key: int, size: int) -> None:
        self.now += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
