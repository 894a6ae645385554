"""`keepstep plan`: what a run will take on any number of GPUs (`launch/plan/`)."""

import argparse
import re
from pathlib import Path

from launch.numbers import number, whole
from launch.plan.estimate import Assumptions, Plan, plan_recipe
from launch.plan.failures import GPU_HOURS_PER_FAILURE
from launch.plan.machine import find_machine
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
"""
UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
DEFAULT = Assumptions()


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep plan`."""
    parser.epilog = EXAMPLES
    parser.add_argument("recipe", type=Path, help="YAML file of the recipe")
    parser.add_argument("overrides", nargs="*", help="settings that replace the recipe's, such as parallel.tensor=8")
    parser.add_argument("--gpus", type=whole("--gpus", 1, 1 << 20), required=True, help="number of all GPUs")
    parser.add_argument("--gpu", default="h100", help="kind of GPU (default: h100)")
    parser.add_argument("--machines", type=Path, metavar="FILE", help="YAML file of further kinds of GPU")
    parser.add_argument("--tokens", type=token_count, help="tokens of the run, such as 15T (default: the recipe's)")
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
    what.add_argument("--scale", action="store_true", help="show 8 to 16,384 GPUs")
    parser.add_argument("--top", type=whole("--top", 1, 10_000), default=10, help="layouts shown (default: 10)")
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    """Print the plan, the ranking or the curve."""
    recipe, machine = load_recipe(options.recipe, options.overrides), find_machine(options.gpu, options.machines)
    assumptions = Assumptions(
        gpu_hours_per_failure=options.gpu_hours_per_failure,
        restart_seconds=options.restart_seconds,
        storage_gb_s=options.storage,
        price=options.price,
        price_kwh=options.price_kwh,
    )
    if options.search:
        found = search(recipe, options.gpus, machine, assumptions, options.tokens)
        if not found:
            raise ConfigError(
                f"no layout of {options.recipe} fits {options.gpus} x {options.gpu} ({machine.memory_gb:g} GB); "
                "use more GPUs, a smaller train.micro_batch_size or model.seq_len"
            )
        shown = found[: options.top]
        if options.json:
            print_json([{"overrides": overrides(setting), **as_document(plan)} for setting, plan in shown])
        else:
            print_search(found, options.top)
        return FINISHED
    if options.scale:
        curve = scale_curve(recipe, machine, assumptions, options.tokens)
        if options.json:
            print_json([{"gpus": gpus, **as_document(plan)} for gpus, plan in curve])
        else:
            print_scale(curve)
        return FINISHED
    return _print_one(recipe, options, plan_recipe(recipe, options.gpus, machine, assumptions, options.tokens))


def _print_one(recipe: Recipe, options: argparse.Namespace, plan: Plan) -> int:
    if options.json:
        print_json(as_document(plan))
        return FINISHED
    print_plan(plan)
    if not plan.fits and (changes := what_would_fit(recipe, options.gpus, plan.machine, plan.assumptions)):
        print("\nchanges that save most memory:")
        print_changes(changes)
    return FINISHED


def token_count(text: str) -> float:
    """A number of tokens such as 300B. ConfigError for any other text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([KMBT]?)", text.strip(), re.IGNORECASE)
    tokens = float(found[1]) * UNITS[found[2].upper()] if found else 0.0
    if not 0 < tokens < 1e18:
        raise ConfigError(f"--tokens ({text}) must be a positive number, such as 300B or 15T")
    return tokens
