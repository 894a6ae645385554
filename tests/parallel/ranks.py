"""Real gloo ranks for a test: `run_ranks(FILE, FUNCTION, N, argument)` calls the function in each of N processes.

The argument must be JSON. The function returns anything that `torch.save` can write. As a program, this file is one
such rank.
"""

import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]


def run_ranks(
    file: str | Path, function: str, world_size: int, argument: Any = None, timeout: float = 900
) -> list[Any]:
    """The results in order of rank. Raises AssertionError with the traceback of the first rank that failed."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        ranks = []
        for rank in range(world_size):
            command = [sys.executable, __file__, str(file), function, json.dumps(argument), f"{folder}/{rank}.pt"]
            with Path(folder, f"{rank}.log").open("w") as output:
                ranks.append(
                    subprocess.Popen(command, cwd=ROOT, env=_env(rank, world_size, port), stdout=output, stderr=output)
                )
        _wait(ranks, timeout)
        failed = [rank for rank, process in enumerate(ranks) if process.returncode != 0]
        logs = [Path(folder, f"{rank}.log").read_text() for rank in range(world_size)]
        if failed:
            # Prefer a rank that failed itself to one that lost its peer or that `_wait` killed.
            first = min(failed, key=lambda rank: ("Traceback" not in logs[rank], "peer" in logs[rank], rank))
            raise AssertionError(f"rank {first} of {world_size} exited with {ranks[first].returncode}:\n{logs[first]}")
        return [torch.load(f"{folder}/{rank}.pt", weights_only=True, map_location="cpu") for rank in range(world_size)]


def _env(rank: int, world_size: int, port: int) -> dict[str, str]:
    names = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    return {
        **os.environ,
        **{name: str(value) for name, value in names.items()},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }


def _wait(ranks: list[subprocess.Popen[bytes]], timeout: float) -> None:
    """Wait until all ranks have exited. When one fails or the time is up, kill the others."""
    deadline = time.monotonic() + timeout
    while any(process.poll() is None for process in ranks):
        if time.monotonic() > deadline or any(process.returncode for process in ranks):
            time.sleep(1.0)  # lets the others print their errors
            for process in ranks:
                process.kill()
        time.sleep(0.02)
    for process in ranks:
        process.wait()


def main() -> None:
    """Run one rank."""
    from parallel.bootstrap import leave, leave_at_once

    file, function, argument, result = sys.argv[1:]
    try:
        torch.save(runpy.run_path(file)[function](json.loads(argument)), result)
    except BaseException:
        traceback.print_exc()
        leave_at_once(1)
    leave(0)


if __name__ == "__main__":
    main()
