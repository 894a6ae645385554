"""`python -m train RECIPE [SECTION.KEY=VALUE ...]`: one rank of a training run, however it was started.

Handlers for stop signals stand before anything slow is imported, so that no signal is lost or fatal.
"""

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Sequence

from train.stop import StopRequest


def main(arguments: Sequence[str]) -> None:
    """Train, and leave the process with one of the codes of `train.exit_codes`. Never returns."""
    stop = StopRequest()
    stop.install()
    parser = argparse.ArgumentParser(prog="python -m train", description="Train a recipe as one rank of a run.")
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="SECTION.KEY=VALUE")
    options = parser.parse_args(arguments)

    from train.errors import USER_ERRORS
    from train.exit_codes import FAILED

    rank = os.environ.get("RANK", "0")
    try:
        code = train_recipe(options.recipe, options.overrides, stop)
    except USER_ERRORS as error:
        if rank == "0":
            print(f"keepstep: {error}", file=sys.stderr, flush=True)
        leave_now(error.exit_code)
    except BaseException:
        print(f"keepstep: rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        leave_now(FAILED)
    else:
        from parallel.bootstrap import leave

        leave(code)


def train_recipe(path: str, overrides: Sequence[str], stop: StopRequest) -> int:
    """Read, check, start the ranks, train. Returns the exit code. Collective."""
    from parallel.environ import read_world
    from train.config_file import load_recipe
    from train.run_folder import RunFolder

    recipe = load_recipe(path, overrides)
    world = read_world(os.environ)
    folder = RunFolder.of(recipe)
    stop.file = folder.stop_request
    set_up_logging(world.rank)

    from parallel.bootstrap import start  # from here on, torch
    from train.loop import train
    from train.run import open_run

    folder.root.mkdir(parents=True, exist_ok=True)
    runtime = start(recipe.parallel, world)
    run = open_run(recipe, runtime, stop)
    code = train(run)
    run.checkpoints.close()
    run.stream.close()
    run.metrics.close()
    run.engine.close()
    return code


def set_up_logging(rank: int) -> None:
    """Sentences on stderr: all of rank 0's, and the warnings of the others."""
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format="%(asctime)s %(message)s" if rank == 0 else f"%(asctime)s [rank {rank}] %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )


def leave_now(code: int) -> None:
    """After an error: no collective, no clean-up that could wait for a peer."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
