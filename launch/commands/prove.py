"""`keepstep prove`: show on the user's own recipe and machine that a run resumes exactly (`launch/proof/`)."""

import argparse
import sys
import time
from pathlib import Path

from launch.numbers import number, whole
from launch.proof.plan import KINDS, parse_layout
from launch.proof.prove import ProofOptions, prove
from launch.terminal import add_json_option, print_json
from train.errors import ConfigError
from train.exit_codes import FAILED, FINISHED
from train.health.safe_output import protect_output

EXAMPLES = """\
examples:
  keepstep prove recipes/laptop.yaml --ranks 2 --also ddp:1 --also zero3:2
  keepstep prove --replay runs/laptop --step 40      # train that step again and compare its bits

In a Slurm allocation of several nodes, srun starts the runs on all of them. Progress is printed on standard error.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep prove`."""
    parser.epilog = EXAMPLES
    parser.add_argument("recipe", nargs="?", help="YAML file of the recipe")
    parser.add_argument("overrides", nargs="*", help="settings that replace the recipe's, such as model.n_layers=2")
    parser.add_argument(
        "--ranks",
        type=whole("--ranks", 1, 4096),
        default=2,
        help="processes on this machine, or on each node (default: 2)",
    )
    parser.add_argument("--steps", type=whole("--steps", 1), default=12, help="optimizer steps (default: 12)")
    parser.add_argument("--faults", default=",".join(KINDS), help=f"some of {','.join(KINDS)} (default: all)")
    parser.add_argument(
        "--seed", type=whole("--seed", 0), default=0, help="seed of the moments of the faults (default: 0)"
    )
    parser.add_argument(
        "--also", action="append", default=[], metavar="ENGINE:RANKS", help="also resume under this layout"
    )
    parser.add_argument(
        "--tolerance",
        type=number("--tolerance", 0, 1),
        default=0.01,
        help="largest relative difference of a loss under another layout (default: 0.01)",
    )
    parser.add_argument("--out", type=Path, help="folder for runs and report (default: a new folder runs/prove-TIME)")
    parser.add_argument("--replay", type=Path, metavar="RUN", help="instead, train a step of this run again")
    parser.add_argument("--step", type=whole("--step", 1), help="with --replay: the step")
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    """Prove or replay, print the result, and return exit code 1 if a claim is false."""
    protect_output()
    out: Path = options.out or Path("runs") / time.strftime("prove-%Y%m%d-%H%M%S")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out ({out}) is not empty; remove it or name another folder")
    if options.replay is not None:
        from launch.proof.replay import replay

        result = replay(options.replay, options.step, out)
    elif options.recipe is None:
        raise ConfigError("give a recipe, or --replay RUN --step N")
    else:
        result = prove(
            ProofOptions(
                recipe=options.recipe,
                overrides=options.overrides,
                out=out,
                ranks=options.ranks,
                steps=options.steps,
                faults=[kind for kind in options.faults.split(",") if kind],
                seed=options.seed,
                layouts=[parse_layout(text) for text in options.also],
                tolerance=options.tolerance,
            )
        )
    if options.json:
        print_json(result.as_json())
    else:
        print(result.as_text())
    if options.replay is None:
        print(f"report: {out / 'report.txt'}, {out / 'report.json'}", file=sys.stderr)
    return FINISHED if result.passed else FAILED
