"""`keepstep submit`: fill in slurm/train.sbatch for a recipe and a site, and submit it (`launch/clusters/slurm.py`)."""

import argparse
import sys
from pathlib import Path

from launch.clusters.checks import check_data, check_ranks
from launch.clusters.slurm import (
    SITE_FILE,
    JobOptions,
    Site,
    Submitted,
    job_script,
    ranks_per_node,
    read_site,
    submit,
)
from launch.numbers import whole
from launch.plan.checked.devices import Device, device_of_type
from launch.plan.checked.verdict import refuse_what_cannot_fit, verdict
from launch.sweeps.grid import combinations, read_settings
from launch.terminal import add_json_option, print_facts, print_json
from train.config_file import load_recipe
from train.run_folder import MAY_DIFFER, RunFolder

EXAMPLES = """\
examples:
  keepstep submit recipes/llama-1b.yaml --nodes 4 --dry-run      # print the script
  keepstep submit recipes/llama-1b.yaml --nodes 4 --min-nodes 3
  keepstep submit recipes/llama-1b.yaml train.steps=2000 -- --reservation=course -C a100    # options of sbatch
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep submit`."""
    parser.epilog = EXAMPLES
    parser.add_argument("recipe", type=Path, help="YAML file of the recipe")
    parser.add_argument(
        "overrides",
        nargs="*",
        help="settings that replace the recipe's, such as train.steps=200; after --, further options of sbatch",
    )
    parser.add_argument("--nodes", type=whole("--nodes", 0), default=1, help="machines (default: 1)")
    parser.add_argument(
        "--min-nodes", type=whole("--min-nodes", 1), help="continue with as few as this when nodes are lost"
    )
    parser.add_argument(
        "--ranks",
        type=whole("--ranks", 1, 4096),
        help="processes a node (default: the site's GPUs, or its ranks, per node)",
    )
    parser.add_argument("--time", help="time limit of one attempt, in Slurm's format")
    parser.add_argument("--cluster", type=Path, help=f"file of site settings (default: {SITE_FILE}, if it exists)")
    parser.add_argument(
        "--requeue-limit", type=whole("--requeue-limit", 0), default=20, help="attempts after the first (default: 20)"
    )
    parser.add_argument(
        "--chain",
        type=whole("--chain", 1, 1000),
        default=1,
        metavar="N",
        help="N jobs, each after the end of the one before (default: 1)",
    )
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="SECTION.KEY=A,B,C",
        help="an array job with one run for each value; given twice, with one run for each combination",
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        choices=MAY_DIFFER,
        help="accept that this part of the recipe differs from the checkpoint's",
    )
    parser.add_argument("--skip-data-check", action="store_true", help="do not look for the data sets on this machine")
    parser.add_argument("--force", action="store_true", help="submit although the plan says that memory cannot suffice")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--dry-run", action="store_true", help="print the script and submit nothing")
    add_json_option(output)


def run(options: argparse.Namespace) -> int:
    """Print the script, or submit it and print the jobs."""
    overrides, sbatch = split_words(options.overrides)
    recipe = load_recipe(options.recipe, overrides)
    tasks = combinations(read_settings(options.sweep, "--sweep")) if options.sweep else []
    recipes = [load_recipe(options.recipe, [*overrides, *task.overrides]) for task in tasks] or [recipe]
    job = JobOptions(
        recipe=options.recipe,
        overrides=overrides,
        sweep=[" ".join([task.suffix, *task.overrides]) for task in tasks],
        allow=options.allow,
        force=options.force,
        sbatch=sbatch,
        nodes=options.nodes,
        min_nodes=options.min_nodes,
        ranks=options.ranks,
        time=options.time,
        requeue_limit=options.requeue_limit,
        site_file=options.cluster,
    )
    folder = RunFolder.of(recipe)
    script = job_script(job, folder)
    site = read_site(job.site_file)
    if ranks := ranks_per_node(job, site):
        for each in recipes:
            check_ranks(each, ranks, range(job.min_nodes or job.nodes, job.nodes + 1))
        if device := gpu_of(job, site):
            for each in recipes:
                refuse_what_cannot_fit(each, ranks * job.nodes, device, force=options.force)
            print(f"keepstep: {verdict(recipes[0], ranks * job.nodes, device)}", file=sys.stderr)
    if options.dry_run:
        print(script, end="")
        return 0
    if not options.skip_data_check:
        for each in recipes:
            check_data(each)
    _show(submit(script, job, folder, options.chain), options)
    return 0


def gpu_of(job: JobOptions, site: Site) -> Device | None:
    """Return the GPU that the site's file names, such as `GPUS_PER_NODE=h100:8`; None if it may be another one."""
    kinds = [part.rpartition(":")[0] for part in site.gpus_per_node.split(",")]
    others = ("--gpu", "--gres", "--constraint", "--partition", "-C", "-G", "-p")
    if len(kinds) > 1 or not kinds[0] or any(word.startswith(others) for word in job.sbatch):
        return None
    return device_of_type(kinds[0])


def split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the overrides, and the options of sbatch: the first word that begins with a dash, and all after it."""
    first = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
    return words[:first], words[first:]


def _show(submitted: Submitted, options: argparse.Namespace) -> None:
    if options.json:
        print_json(
            {"jobs": submitted.jobs, "script": str(submitted.script), "log": submitted.log, "run": submitted.run}
        )
        return
    for number in submitted.jobs:
        print(f"job {number} submitted: {submitted.script}")
    print_facts(
        [
            ("log", submitted.log),
            ("watch", f"tail -F {submitted.log}"),
            ("state", f"squeue --job {','.join(submitted.jobs)}; keepstep status {submitted.run}"),
            ("ranks", f"{submitted.run}/logs/HOST/rank-N.log"),
            ("stop", f"keepstep stop {submitted.run} (saves first)"),
        ],
        indent=0,
    )
