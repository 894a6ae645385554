"""Runs function calls in this process, in worker processes of this machine, or on MPI ranks.

Under `mpirun`, rank 0 distributes the calls and the other ranks run them. The results never depend on the choice.
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
"""A function and its arguments."""


class Pool:
    """Runs calls with an executor, or in this process if it is None."""

    def __init__(self, executor: Executor | None) -> None:
        self._executor = executor

    def run(self, calls: Sequence[Call]) -> Iterator[tuple[int, Any]]:
        """Yields (number of the call, its result) as calls finish, in any order.

        Errors of a call are raised here. StorageError if a worker process dies."""
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
                "a worker process died, possibly out of memory; run the same command again to continue, with fewer "
                "--workers if memory is short"
            ) from None


@contextmanager
def open_pool(workers: int) -> Iterator[Pool]:
    """A pool of `workers` processes; 1: this process."""
    if workers == 1:
        yield Pool(None)
        return
    executor = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    try:
        yield Pool(executor)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def under_mpi(env: Mapping[str, str]) -> bool:
    """Whether mpirun started this process with more than one rank (Open MPI, MPICH or Intel MPI)."""
    return any(int(env.get(name, "1")) > 1 for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))


@contextmanager
def open_mpi_pool() -> Iterator[Pool | None]:
    """Collective. A pool on rank 0. The other ranks run its calls until it is closed, then get None."""
    os.environ.setdefault("MPI4PY_RC_RECV_MPROBE", "0")
    from mpi4py import MPI
    from mpi4py.futures import MPICommExecutor

    with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
        yield None if executor is None else Pool(cast(Executor, executor))


def default_workers() -> int:
    """Number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))
