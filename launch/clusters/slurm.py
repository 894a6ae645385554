"""`keepstep submit`: fill in slurm/train.sbatch for a recipe and a site, show it or hand it to Slurm.

The script is saved in the run folder, where it can be read and submitted by hand. What the site is like stands in one
file (slurm/cluster.env.example shows all of it).
"""

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path

from parallel.errors import LaunchError
from train.config_file import load_recipe
from train.run_folder import RunFolder

SITE_FILE = Path("slurm/cluster.env")


@dataclass(frozen=True, kw_only=True)
class Site:
    """The lines of cluster.env, by their names in lower case."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    gpus_per_node: str = ""
    cpus_per_node: str = "8"
    ranks_per_node: str = ""
    time: str = "24:00:00"
    warn_seconds: str = "180"
    exclude: str = ""
    sbatch_options: str = ""
    network_interface: str = ""
    node_setup: str = ""
    python: str = ""
    pyxis_image: str = ""
    apptainer_image: str = ""
    mounts: str = ""
    health_options: str = ""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="the recipe's YAML file")
    parser.add_argument("overrides", nargs="*", help="settings that replace the recipe's, such as train.steps=200")
    parser.add_argument("--nodes", type=int, default=1, help="machines")
    parser.add_argument("--min-nodes", type=int, help="go on with as few when nodes are lost")
    parser.add_argument("--ranks", type=int, help="processes a node (default: the site's GPUs, or its ranks, per node)")
    parser.add_argument("--time", help="time limit of one attempt, as Slurm writes it")
    parser.add_argument("--cluster", type=Path, help=f"the site's file (default: {SITE_FILE}, if there is one)")
    parser.add_argument("--requeue-limit", type=int, default=20, help="attempts after the first")
    parser.add_argument(
        "--chain", type=int, default=1, metavar="N", help="N jobs, each after the end of the one before"
    )
    parser.add_argument("--sweep", metavar="SECTION.KEY=A,B,C", help="an array job, one run for each value")
    parser.add_argument("--dry-run", action="store_true", help="show the script and submit nothing")


def run(options: argparse.Namespace) -> int:
    recipe = load_recipe(options.recipe, options.overrides)
    sweep = sweep_overrides(options.sweep) if options.sweep else []
    for override in sweep:
        load_recipe(options.recipe, [*options.overrides, override])
    folder = RunFolder.of(recipe)
    site = read_site(options.cluster)
    script = render(
        files("slurm").joinpath("train.sbatch").read_text(encoding="utf-8"),
        directives(options, site, folder, sweep),
        settings(options, site, folder, sweep),
    )
    if options.dry_run:
        print(script, end="")
        return 0
    folder.logs.mkdir(parents=True, exist_ok=True)
    path = folder.root / "train.sbatch"
    path.write_text(script, encoding="utf-8")
    log = str(folder.logs.resolve() / log_name(sweep))
    jobs: list[str] = []
    for _ in range(options.chain):
        jobs.append(submit(path, [f"--dependency=afterany:{jobs[-1]}"] if jobs else []))
        print(f"job {jobs[-1]} submitted: {path}")
    log = log.replace("%A", jobs[0]).replace("%j", jobs[0]).replace("%a", "0")
    run = f"{folder.root}-TASK" if sweep else str(folder.root)
    print(f"log    {log}\nwatch  tail -F {log}\nstate  squeue --job {','.join(jobs)}; keepstep status {run}")
    print(f"ranks  {run}/logs/HOST/rank-N.log\nstop   keepstep stop {run} (saves first)")
    return 0


def submit(script: Path, options: Sequence[str]) -> str:
    """The job's id. LaunchError with Slurm's own words if it refuses."""
    try:
        argv = ["sbatch", "--parsable", *options, str(script)]
        result = subprocess.run(argv, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise LaunchError("there is no sbatch on this machine; submit from a login node of the cluster") from None
    except subprocess.CalledProcessError as error:
        raise LaunchError(f"Slurm refused {script}: {' '.join(error.stderr.split())}") from None
    return result.stdout.strip().partition(";")[0]


def read_site(path: Path | None) -> Site:
    """The site's file: NAME=VALUE lines as a shell reads them. LaunchError for what it doesn't know."""
    if path is None and not SITE_FILE.exists():
        return Site()
    path = path or SITE_FILE
    try:
        words = shlex.split(path.read_text(encoding="utf-8"), comments=True)
    except (OSError, ValueError) as error:
        raise LaunchError(f"the site's file {path} cannot be read: {error}") from None
    values = {name: value for name, _, value in (word.partition("=") for word in words)}
    known = {field.name.upper() for field in fields(Site)}
    if unknown := set(values) - known:
        raise LaunchError(f"{path} has {sorted(unknown)[0]}, which is none of {', '.join(sorted(known))}")
    return Site(**{name.lower(): value for name, value in values.items() if value})


def sweep_overrides(text: str) -> list[str]:
    key, equals, values = text.partition("=")
    if not equals or not values:
        raise LaunchError(f"--sweep {text} must read SECTION.KEY=A,B,C, such as optim.lr=1e-3,2e-3")
    return [f"{key}={value}" for value in values.split(",")]


def log_name(sweep: Sequence[str]) -> str:
    return "slurm-%A-%a.log" if sweep else "slurm-%j.log"


def directives(
    options: argparse.Namespace, site: Site, folder: RunFolder, sweep: Sequence[str]
) -> dict[str, str | None]:
    """The #SBATCH lines that are not as in the template; None: an option without a value."""
    if options.nodes < 1 or (options.min_nodes or 1) > options.nodes or (options.min_nodes or 1) < 1:
        raise LaunchError(
            f"--nodes ({options.nodes}) must be at least --min-nodes ({options.min_nodes or 1}), and that 1"
        )
    wanted: dict[str, str | None] = {
        "job-name": folder.root.name,
        "nodes": f"{options.min_nodes}-{options.nodes}" if options.min_nodes else str(options.nodes),
        "cpus-per-task": site.cpus_per_node,
        "time": options.time or site.time,
        "output": str(folder.logs.resolve() / log_name(sweep)),
        "signal": f"USR2@{site.warn_seconds}",
        "chdir": str(Path.cwd()),
    }
    for name, value in (
        ("partition", site.partition),
        ("account", site.account),
        ("qos", site.qos),
        ("gpus-per-node", site.gpus_per_node),
        ("exclude", site.exclude),
        ("array", f"0-{len(sweep) - 1}" if sweep else ""),
    ):
        if value:
            wanted[name] = value
    for option in shlex.split(site.sbatch_options):
        name, equals, value = option.removeprefix("--").partition("=")
        wanted[name] = value if equals else None
    return wanted


def settings(options: argparse.Namespace, site: Site, folder: RunFolder, sweep: Sequence[str]) -> dict[str, str]:
    """The settings of the template that are not as in it, as shell text."""
    ranks = options.ranks or site.gpus_per_node or site.ranks_per_node
    setup = [site.node_setup] if site.node_setup else []
    if site.network_interface:
        names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
        setup.append("export " + " ".join(f"{name}={shlex.quote(site.network_interface)}" for name in names))
    container = bool(site.pyxis_image or site.apptainer_image)
    srun = [f"--container-image={site.pyxis_image}"] if site.pyxis_image else []
    if site.pyxis_image and site.mounts:
        srun.append(f"--container-mounts={site.mounts}")
    wrap = ["apptainer", "exec", "--nv", *(["--bind", site.mounts] if site.mounts else []), site.apptainer_image]
    return {
        "RECIPE": shlex.quote(str(Path(options.recipe).resolve())),
        "OVERRIDES": _array(options.overrides),
        "SWEEP": _array(sweep),
        "RUN": shlex.quote(str(folder.root)),
        "PYTHON": shlex.quote(site.python or ("python3" if container else sys.executable)),
        "RANKS": _array(["--ranks", str(ranks)] if ranks else []),
        "NODE_SETUP": shlex.quote("; ".join(setup)) if setup else "",
        "SRUN": _array(srun),
        "WRAP": _array(wrap if site.apptainer_image else []),
        "HEALTH": _array(shlex.split(site.health_options)),
        "REQUEUE_LIMIT": str(options.requeue_limit),
        "STOP_SECONDS": str(max(10, int(site.warn_seconds) - 30)),
    }


def render(template: str, directives: Mapping[str, str | None], settings: Mapping[str, str]) -> str:
    """The template with these #SBATCH lines and settings; directives that it lacks are added."""
    added = []
    for name, value in directives.items():
        line = f"#SBATCH --{name}" + ("" if value is None else f"={value}")
        pattern = rf"^#SBATCH --{re.escape(name)}(=.*)?$"
        if re.search(pattern, template, re.MULTILINE):
            template = re.sub(pattern, lambda _, line=line: line, template, count=1, flags=re.MULTILINE)
        else:
            added.append(line)
    last = template.rindex("#SBATCH --")
    end = template.index("\n", last)
    template = template[:end] + "".join(f"\n{line}" for line in added) + template[end:]
    for name, value in settings.items():
        pattern = rf"^{name}=.*?(?=\s+# |$)"
        assert re.search(pattern, template, re.MULTILINE), name
        template = re.sub(pattern, lambda _, n=name, v=value: f"{n}={v}", template, count=1, flags=re.MULTILINE)
    return template


def _array(words: Sequence[str]) -> str:
    return f"({' '.join(shlex.quote(word) for word in words)})"
