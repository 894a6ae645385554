"""Arguments about rows, shards and workers, which `build` and `repack` share."""

import argparse
import os
from typing import TYPE_CHECKING, Any

from launch.numbers import whole

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from data_pipeline.build.workers import Pool


def add_packing(parser: argparse.ArgumentParser) -> None:
    """Add the options for packing documents into rows, and the number of workers."""
    parser.add_argument(
        "--seq-len", type=whole("--seq-len", 1), default=1024, metavar="N", help="tokens per row (default: 1024)"
    )
    parser.add_argument(
        "--packing",
        choices=("best-fit", "concatenate"),
        default="best-fit",
        help="cut only documents longer than a row, or join all and cut at every row (default: best-fit)",
    )
    parser.add_argument("--compress", action="store_true", help="compress the shards with zstd")
    parser.add_argument(
        "--workers", type=whole("--workers", 1, 4096), metavar="N", help="worker processes (default: one per CPU)"
    )


def packing_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of BuildOptions that `add_packing` added."""
    compression = "zstd" if options.compress else "none"
    return {"seq_len": options.seq_len, "packing": options.packing, "compression": compression}


def open_workers(workers: int | None) -> "AbstractContextManager[Pool | None]":
    """Open the MPI ranks under mpirun, else worker processes. Under mpirun the pool is None on all ranks but 0."""
    from data_pipeline.build.workers import default_workers, open_mpi_pool, open_pool, under_mpi

    return open_mpi_pool() if under_mpi(os.environ) else open_pool(workers or default_workers())
