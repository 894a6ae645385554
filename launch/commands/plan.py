"""`keepstep plan`: what a run will take on any number of GPUs (`launch/plan/`)."""

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path

from launch.numbers import count, number, whole
from launch.plan.chart import draw_scale
from launch.plan.estimate import Assumptions, Plan, plan_recipe
from launch.plan.failures import GPU_HOURS_PER_FAILURE
from launch.plan.machine import Machine, find_machine
from launch.plan.report import as_document, overrides, print_changes, print_plan, print_scale, print_search
from launch.plan.search import scale_curve, search, what_would_fit
from launch.terminal import add_json_option, print_json
from train.config import Recipe
from train.config_file import load_recipe
from train.errors import ConfigError
from train.exit_codes import FINISHED

EXAMPLES = """\
examples:
  keepstep plan recipes/llama-70b.yaml --gpus 1024 --gpu h100 --tokens 15T
  keepstep plan recipes/llama-8b.yaml --gpus 64 --gpu h100 --search    # the layouts that fit, as overrides
  keepstep plan recipes/llama-8b.yaml --gpus 64 --gpu h200 --scale     # 8 to 16,384 GPUs
  keepstep plan recipes/laptop.yaml --measure                          # plan, run a few steps, compare
"""
DEFAULT = Assumptions()


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep plan`."""
    parser.epilog = EXAMPLES
    parser.add_argument("recipe", type=Path, help="YAML file of the recipe")
    parser.add_argument("overrides", nargs="*", help="settings that replace the recipe's, such as parallel.tensor=8")
    parser.add_argument(
        "--gpus", type=whole("--gpus", 1, 1 << 20), help="number of all GPUs; with --measure: ranks of this machine"
    )
    parser.add_argument("--gpu", default="h100", help="kind of GPU (default: h100)")
    parser.add_argument("--machines", type=Path, metavar="FILE", help="YAML file of further kinds of GPU")
    parser.add_argument(
        "--tokens", type=count("--tokens", "300B or 15T"), help="tokens of the run, such as 15T (default: the recipe's)"
    )
    parser.add_argument(
        "--gpu-hours-per-failure",
        type=number("--gpu-hours-per-failure", 1, 1e12),
        default=DEFAULT.gpu_hours_per_failure,
        metavar="H",
        help="GPU-hours between failures (default: %(default).0f, as Llama 3 had; "
        + ", ".join(f"{name} {hours:.0f}" for name, hours in GPU_HOURS_PER_FAILURE.items() if name != "llama3")
        + ")",
    )
    parser.add_argument(
        "--restart-seconds",
        type=number("--restart-seconds", 0, 1e6),
        default=DEFAULT.restart_seconds,
        metavar="S",
        help="seconds from a failure to the next step (default: %(default).0f)",
    )
    parser.add_argument(
        "--storage",
        type=number("--storage", 1e-3, 1e6),
        default=DEFAULT.storage_gb_s,
        metavar="GB/S",
        help="bandwidth of the shared file system to all nodes together (default: %(default).0f)",
    )
    parser.add_argument("--price", type=number("--price", 0, 1e6), help="price of a GPU-hour")
    parser.add_argument("--price-kwh", type=number("--price-kwh", 0, 1e6), help="price of a kilowatt-hour")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--search", action="store_true", help="rank the layouts that fit")
    what.add_argument("--exact", action="store_true", help="count what a rank holds, on fake tensors; needs torch")
    what.add_argument("--measure", action="store_true", help="run a few steps on this machine and compare")
    what.add_argument("--scale", action="store_true", help="show 8 to 16,384 GPUs")
    parser.add_argument("--png", type=Path, metavar="FILE", help="with --scale: draw the curve into a file, too")
    parser.add_argument("--top", type=whole("--top", 1, 10_000), default=10, help="layouts shown (default: 10)")
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    """Print the plan, the ranking, the curve or a comparison."""
    recipe = load_recipe(options.recipe, options.overrides)
    if options.measure:
        return _measure(recipe, options)
    if options.gpus is None:
        raise ConfigError("--gpus is missing: say for how many GPUs the plan is, such as --gpus 64")
    machine = find_machine(options.gpu, options.machines)
    assumptions = Assumptions(
        gpu_hours_per_failure=options.gpu_hours_per_failure,
        restart_seconds=options.restart_seconds,
        storage_gb_s=options.storage,
        price=options.price,
        price_kwh=options.price_kwh,
    )
    if options.search:
        return _search(recipe, options, machine, assumptions)
    if options.scale:
        return _scale(recipe, options, machine, assumptions)
    if options.exact:
        return _exact(recipe, options)
    return _print_one(recipe, options, plan_recipe(recipe, options.gpus, machine, assumptions, options.tokens))


def _search(recipe: Recipe, options: argparse.Namespace, machine: Machine, assumptions: Assumptions) -> int:
    found = search(recipe, options.gpus, machine, assumptions, options.tokens)
    if not found:
        raise ConfigError(
            f"no layout of {options.recipe} fits {options.gpus} x {options.gpu} ({machine.memory_gb:g} GB); "
            "use more GPUs, a smaller train.micro_batch_size or model.seq_len"
        )
    if options.json:
        shown = found[: options.top]
        print_json([{"overrides": overrides(setting), **as_document(plan)} for setting, plan in shown])
    else:
        print_search(found, options.top)
    return FINISHED


def _scale(recipe: Recipe, options: argparse.Namespace, machine: Machine, assumptions: Assumptions) -> int:
    curve = scale_curve(recipe, machine, assumptions, options.tokens)
    if options.json:
        print_json([{"gpus": gpus, **as_document(plan)} for gpus, plan in curve])
    else:
        print_scale(curve)
    if options.png is not None:
        draw_scale(curve, options.png, f"{recipe.name} on {options.gpu}")
        print(f"written: {options.png}", file=sys.stderr)
    return FINISHED


def _exact(recipe: Recipe, options: argparse.Namespace) -> int:
    from launch.plan.checked.exact import count_exactly, print_exact

    found = count_exactly(recipe, options.gpus)
    print_json(asdict(found)) if options.json else print_exact(found)
    return FINISHED


def _measure(recipe: Recipe, options: argparse.Namespace) -> int:
    from launch.plan.checked.measure import compare, print_comparison
    from launch.supervise.local import choose_ranks, count_gpus

    found = compare(recipe, choose_ranks(options.gpus, count_gpus(os.environ), recipe.parallel.device))
    if options.json:
        measured = {"peak_bytes": found.peak_bytes, "step_seconds": found.step_seconds}
        print_json({"plan": as_document(found.plan), "measured": measured})
    else:
        print_comparison(found)
    return FINISHED


def _print_one(recipe: Recipe, options: argparse.Namespace, plan: Plan) -> int:
    if options.json:
        print_json(as_document(plan))
        return FINISHED
    print_plan(plan)
    if not plan.fits and (changes := what_would_fit(recipe, options.gpus, plan.machine.domain)):
        print("\nchanges that save most memory:")
        print_changes(changes)
    return FINISHED
