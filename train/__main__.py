"""`python -m train RECIPE [SECTION.KEY=VALUE ...]`: one rank of a training run, however it was started.

Handlers for stop signals are installed before anything slow is imported, so that no signal is lost or fatal. A rank
that fails prints the reason and exits immediately, without a collective: its peers see the lost connection.
"""

import argparse
import contextlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import NoReturn

import train.records.clock  # noqa: F401 - counts the seconds of this process from here, before torch is imported
from data_pipeline.credentials import RedactingFormatter, redact
from train.errors import USER_ERRORS, StoppedError
from train.exit_codes import FAILED, STOPPED
from train.health import garbage
from train.health.safe_output import erase_view, protect_output
from train.health.stop import StopRequest
from train.run_folder import MAY_DIFFER

RANK_NAMES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
"""Variables that may hold this process's rank, for error messages. `parallel.environ` reads the environment fully."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables of torch's allocator, the newest first."""
PEER_SECONDS = 2.0
"""Seconds that a failing rank waits, so that the rank that knows the cause reports first: rank 0, where all ranks see
the same mistake, or the rank whose connection was lost."""


def main(arguments: Sequence[str]) -> NoReturn:
    """Train, and exit the process with one of the codes of `train.exit_codes`."""
    protect_output()
    let_segments_grow(os.environ)
    garbage.pause()
    stop = StopRequest()
    stop.install()
    parser = argparse.ArgumentParser(prog="python -m train", description="Train a recipe as one rank of a run.")
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="SECTION.KEY=VALUE")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        choices=MAY_DIFFER,
        help="what may differ from the checkpoint on a resume",
    )
    parser.add_argument("--local_rank", help="passed by DeepSpeed's launcher; ignored, because the environment has it")
    options = parser.parse_intermixed_args(arguments)
    rank = int(next((os.environ[name] for name in RANK_NAMES if name in os.environ), "0"))
    try:
        code = train_recipe(options.recipe, options.overrides, stop, frozenset(options.allow))
    except USER_ERRORS as error:
        if rank == 0 or not _ended_by_launcher(stop):
            erase_view()
            print(redact(f"keepstep: {error}"), file=sys.stderr)
        _report_to_torchrun(str(error))
        _exit_now(error.exit_code)
    except Exception as error:
        if _only_lost_a_peer(error) and _ended_by_launcher(stop):
            _exit_now(FAILED)
        erase_view()
        print(redact(f"keepstep: rank {rank} failed:\n{traceback.format_exc()}"), file=sys.stderr)
        _report_to_torchrun(f"{type(error).__name__}: {error}")
        _exit_now(FAILED)
    from parallel.bootstrap import leave

    if code == STOPPED:
        _report_to_torchrun("stopped on request, with a complete checkpoint: run the same command again to resume")
    leave(code)


def let_segments_grow(env: MutableMapping[str, str]) -> None:
    """Let the allocator's segments on a device grow, so that memory fragments less. A user's own settings stay."""
    if not any(name in env for name in ALLOCATOR):
        env[ALLOCATOR[0]] = "expandable_segments:True"


def train_recipe(path: str, overrides: Sequence[str], stop: StopRequest, allow: frozenset[str]) -> int:
    """Read and check the recipe, join the other ranks, and train; return the exit code. Collective."""
    from parallel.environ import read_world
    from parallel.mpi import meet
    from train.config_file import load_recipe
    from train.health.exhausted import make_folder
    from train.run_folder import RunFolder

    recipe = load_recipe(path, overrides)
    world = meet(read_world(os.environ))
    folder = RunFolder.of(recipe)
    make_folder(folder.root)
    if world.rank == 0:  # it tells the others before each step; thousands of ranks would all ask the file system
        stop.file = folder.stop_request
    set_up_logging(world.rank)

    from parallel.bootstrap import start  # torch is imported from here
    from train.loop import train
    from train.start import open_run

    garbage.freeze_imports()
    runtime = start(recipe.parallel, world)
    try:
        with open_run(recipe, runtime, stop, allow) as run:
            return train(run)
    except StoppedError as stopped:
        logging.getLogger(__name__).info("%s", stopped)
        return stopped.exit_code


def set_up_logging(rank: int) -> None:
    """Log to stderr: all messages of rank 0, warnings and errors of the other ranks."""
    handler = logging.StreamHandler(sys.stderr)
    line = "%(asctime)s %(message)s" if rank == 0 else f"%(asctime)s [rank {rank}] %(message)s"
    handler.setFormatter(RedactingFormatter(line, datefmt="%H:%M:%S"))
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, handlers=[handler])


def _only_lost_a_peer(error: Exception) -> bool:
    from train.health.watchdog import is_lost_peer

    return is_lost_peer(error)


def _ended_by_launcher(stop: StopRequest) -> bool:
    """Return whether the launcher ends this rank because a peer failed: then the peer has reported the cause."""
    deadline = time.monotonic() + PEER_SECONDS
    while not stop and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(stop)


def _report_to_torchrun(words: str) -> None:
    """Write a message for the table that torchrun, started by hand, prints when a rank does not exit with 0."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError):
            report = {"message": redact(words), "timestamp": int(time.time())}
            Path(file).write_text(json.dumps(report), encoding="utf-8")


def _exit_now(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
