"""Runs tasks on this process, on worker processes, or on MPI ranks. The result never depends on which.

Under `mpirun` rank 0 hands out tasks and the other ranks do them; everywhere else the processes are this machine's.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, cast

from data_pipeline.errors import StorageError

Call = tuple[Callable[..., Any], tuple[Any, ...]]


class Pool:
    """Where calls are run. `run` gives (number of the call, its result) as they end, in any order."""

    def __init__(self, executor: Executor | None) -> None:
        self._executor = executor

    def run(self, calls: Sequence[Call]) -> Iterator[tuple[int, Any]]:
        if self._executor is None or len(calls) < 2:
            for number, (function, arguments) in enumerate(calls):
                yield number, function(*arguments)
            return
        try:
            numbers = {self._executor.submit(f, *arguments): number for number, (f, arguments) in enumerate(calls)}
            for future in as_completed(numbers):
                yield numbers.pop(future), future.result()
        except BrokenProcessPool:
            raise StorageError(
                "a worker process died, perhaps for lack of memory; start the same command again to go on where it "
                "stopped, with fewer --workers if memory is short"
            ) from None


@contextmanager
def open_pool(workers: int) -> Iterator[Pool]:
    """`workers` processes, or this one if it is 1."""
    if workers == 1:
        yield Pool(None)
        return
    executor = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    try:
        yield Pool(executor)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def under_mpi(env: Mapping[str, str]) -> bool:
    """Started by mpirun with more than one rank (Open MPI, MPICH and Intel MPI tell their size so)."""
    return any(int(env.get(name, "1")) > 1 for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))


@contextmanager
def open_mpi_pool() -> Iterator[Pool | None]:
    """Collective. The pool on rank 0; None on the others, which do its work until it is closed."""
    os.environ.setdefault("MPI4PY_RC_RECV_MPROBE", "0")
    from mpi4py import MPI
    from mpi4py.futures import MPICommExecutor

    with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
        yield None if executor is None else Pool(cast(Executor, executor))


def default_workers() -> int:
    return len(os.sched_getaffinity(0))
