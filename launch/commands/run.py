"""`keepstep run`: train a recipe on this machine, or as one node of several (`launch/supervise/local.py`)."""

import argparse
import os
import sys

from launch.numbers import number, whole
from launch.supervise.local import choose_ranks, count_gpus, start, this_node
from launch.terminal import add_json_option
from parallel.errors import LaunchError
from train.config_file import load_recipe
from train.health.stop import abort_on_signals
from train.run_folder import MAY_DIFFER

EXAMPLES = """\
examples:
  keepstep run recipes/laptop.yaml                            # all GPUs of this machine, or one CPU rank
  keepstep run recipes/laptop.yaml --ranks 2 train.steps=50
  keepstep run RECIPE --nodes 2 --node-rank 0 --head 10.0.0.7:29400   # and --node-rank 1 on the other machine

Progress and messages go to standard error. To keep them: keepstep run RECIPE > run.log 2>&1
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep run`."""
    parser.epilog = EXAMPLES
    parser.add_argument("recipe", help="YAML file of the recipe")
    parser.add_argument("overrides", nargs="*", help="settings that replace the recipe's, such as train.steps=200")
    parser.add_argument(
        "--ranks", type=whole("--ranks", 1, 4096), help="processes on this machine (default: one for each GPU, or 1)"
    )
    parser.add_argument(
        "--nodes", type=whole("--nodes", 1, 1_000_000), default=1, help="machines in the run (default: 1)"
    )
    parser.add_argument("--node-rank", type=whole("--node-rank", 0), help="number of this machine, from 0")
    parser.add_argument("--head", help="HOST:PORT of node 0; all nodes must reach it, and the port must be free")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        choices=MAY_DIFFER,
        help="accept that this part of the recipe differs from the checkpoint's",
    )
    parser.add_argument(
        "--max-restarts",
        type=whole("--max-restarts", 0),
        default=3,
        help="times that all ranks are restarted after a failure (default: 3)",
    )
    parser.add_argument(
        "--stop-seconds",
        type=number("--stop-seconds", 1, 1_000_000),
        default=600,
        help="longest time from a stop signal to the end (default: 600)",
    )
    parser.add_argument(
        "--fake-world",
        type=whole("--fake-world", 1, 1_000_000),
        metavar="N",
        help="only describe the memory and traffic of one rank of N",
    )
    parser.add_argument(
        "--fake-rank", type=whole("--fake-rank", 0), default=0, metavar="R", help="rank of the fake world (default: 0)"
    )
    parser.add_argument("--force", action="store_true", help="start although the plan says that memory cannot suffice")
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    """Train and return the exit code on which all ranks agree (`train/exit_codes.py`)."""
    with abort_on_signals("the start"):  # until the supervisor installs its own handlers
        recipe = load_recipe(options.recipe, options.overrides)
        if options.fake_world is not None:
            from launch.fake_world import run_fake_world

            world = options.fake_world, options.fake_rank
            return run_fake_world(options.recipe, options.overrides, *world, as_json=options.json)
        if options.json:
            raise LaunchError("--json is for --fake-world; `keepstep status RUN --json` describes a real run")
        ranks = choose_ranks(options.ranks, count_gpus(os.environ), recipe.parallel.device)
        node = this_node(ranks, options.nodes, options.node_rank, options.head)
        from launch.plan.checked.devices import device_here
        from launch.plan.checked.verdict import check_before_run

        on_gpus = recipe.parallel.device in ("auto", "cuda") and count_gpus(os.environ) > 0
        device = device_here(os.environ) if on_gpus else None
        plan = check_before_run(recipe, node, device, force=options.force, on_gpus=on_gpus)
        command = [sys.executable, "-u", "-P", "-m", "train", options.recipe, *options.overrides]
        command += [f"--allow={name}" for name in options.allow]
        return start(command, recipe, node, options.max_restarts, options.stop_seconds, plan)
