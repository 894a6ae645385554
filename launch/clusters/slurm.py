"""The job script of a recipe on a Slurm cluster: slurm/train.sbatch with the job's and the site's settings filled in.

The script is saved in the run folder, where people can read it and submit it by hand. One file holds the settings of
the site (slurm/cluster.env.example lists all of them).
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path

from data_pipeline.atomic_file import write_atomic
from data_pipeline.untrusted import read_file
from launch.clusters.options import check_text, check_time, directive, gpu_count, sbatch_options, whole_number
from parallel.errors import LaunchError
from train.health.exhausted import exhaustion_in_one_line, make_folder
from train.records.events import EventLog
from train.run_folder import RunFolder

SITE_FILE = Path("slurm/cluster.env")
SITE_BYTES = 1 << 20
"""Largest size of a file of site settings."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """The settings of cluster.env, with their names in lower case; slurm/cluster.env.example explains them."""

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


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What is asked for one job; the options of `keepstep submit`."""

    recipe: Path
    overrides: Sequence[str] = ()
    sweep: Sequence[str] = ()
    """What each task of an array job adds to the run's name, and its overrides, separated by spaces; empty: a single
    job."""
    allow: Sequence[str] = ()
    """Parts of the recipe that may differ from the checkpoint (`train.run_folder.MAY_DIFFER`)."""
    force: bool = False
    """Whether the run starts although the plan says that memory cannot suffice."""
    sbatch: Sequence[str] = ()
    """Further options of sbatch, as words."""
    nodes: int = 1
    min_nodes: int | None = None
    """Fewest nodes with which the job continues."""
    ranks: int | None = None
    """Processes a node; None: the site's."""
    time: str | None = None
    """Time limit of an attempt, in Slurm's format; None: the site's."""
    requeue_limit: int = 20
    site_file: Path | None = None


@dataclass(frozen=True)
class Submitted:
    """The jobs that Slurm accepted, and where they write."""

    jobs: list[str]
    """Job ids, in the order of the chain."""
    script: Path
    log: str
    """Log of the first job, or of the first task of a sweep."""
    run: str
    """The run folder; of a sweep, that of its first task."""


def job_script(job: JobOptions, folder: RunFolder) -> str:
    """Return the text of the job script. LaunchError if options or the site's file are wrong."""
    template = files("slurm").joinpath("train.sbatch").read_text(encoding="utf-8")
    site = read_site(job.site_file)
    for name, value in (("--ranks", job.ranks), ("--requeue-limit", job.requeue_limit + 1)):
        if value is not None and value < 1:
            least = int(name == "--ranks")
            raise LaunchError(f"{name} ({value if least else value - 1}) must be at least {least}")
    return render(template, directives(job, site, folder), settings(job, site, folder))


def submit(script: str, job: JobOptions, folder: RunFolder, chain: int) -> Submitted:
    """Save the script in the run folder and submit it `chain` times, each job after the end of the one before.

    LaunchError if Slurm refuses."""
    if chain < 1:
        raise LaunchError(f"--chain ({chain}) must be at least 1")
    path = folder.root / "train.sbatch"
    runs = [Path(f"{folder.root}-{task.split()[0]}") for task in job.sweep] or [folder.root]
    for each in (folder.logs, *runs):
        make_folder(each)
    with exhaustion_in_one_line(folder.root):
        write_atomic(path, script.encode())
    jobs: list[str] = []
    for _ in range(chain):
        try:
            jobs.append(_sbatch(path, [f"--dependency=afterany:{jobs[-1]}"] if jobs else []))
        except LaunchError as error:
            raise LaunchError(f"{error}; submitted before that: {', '.join(jobs) or 'no job'}") from None
    for run in runs:
        EventLog(RunFolder(run).events)("submitted", jobs=jobs)  # for `keepstep status` and `keepstep stop`
    log = log_name(job.sweep).replace("%A", jobs[0]).replace("%j", jobs[0]).replace("%a", "0")
    return Submitted(jobs, path, str(folder.logs.resolve() / log), str(runs[0]))


def _sbatch(script: Path, options: Sequence[str]) -> str:
    """Return the id of the submitted job. LaunchError with Slurm's own message if it refuses."""
    try:
        argv = ["sbatch", "--parsable", *options, str(script.resolve())]
        result = subprocess.run(argv, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise LaunchError("there is no sbatch on this machine; submit from a login node of the cluster") from None
    except subprocess.CalledProcessError as error:
        raise LaunchError(f"Slurm refused {script}: {' '.join(error.stderr.split())}") from None
    return result.stdout.strip().partition(";")[0]


def read_site(path: Path | None) -> Site:
    """Return the settings of the site's file, NAME=VALUE lines in shell syntax. LaunchError for an unknown name."""
    if path is None and not SITE_FILE.exists():
        return Site()
    path = path or SITE_FILE
    try:
        words = shlex.split(read_file(path, limit=SITE_BYTES).decode(), comments=True)
    except (OSError, ValueError) as error:
        raise LaunchError(f"the site's file {path} cannot be read: {error}") from None
    values = {name: value for name, _, value in (word.partition("=") for word in words)}
    known = {field.name.upper() for field in fields(Site)}
    if unknown := set(values) - known:
        shown = ascii(min(unknown)[:100])[1:-1]
        raise LaunchError(f"{path} has {shown}, which is not one of {', '.join(sorted(known))}")
    return Site(**{name.lower(): value for name, value in values.items() if value})


def ranks_per_node(job: JobOptions, site: Site) -> int | None:
    """Return the processes of each node, or None if only the node itself knows: one for each of its GPUs."""
    if job.ranks is not None:
        return job.ranks
    if site.gpus_per_node:
        return gpu_count(site.gpus_per_node)
    return whole_number("RANKS_PER_NODE", site.ranks_per_node, 1) if site.ranks_per_node else None


def log_name(sweep: Sequence[str]) -> str:
    """Return the job's log file name, with Slurm's placeholders."""
    return "slurm-%A-%a.log" if sweep else "slurm-%j.log"


def _log_pattern(folder: RunFolder, sweep: Sequence[str]) -> str:
    """Return the path of the log with Slurm's placeholders in the name of the file alone. LaunchError for a backslash,
    which would make Slurm take them literally."""
    logs = str(folder.logs.resolve())
    if "\\" in logs:
        raise LaunchError(f"the run folder {folder.root} has a backslash in its path, which sbatch cannot write to")
    return f"{logs.replace('%', '%%')}/{log_name(sweep)}"


def directives(job: JobOptions, site: Site, folder: RunFolder) -> dict[str, str | None]:
    """Return the #SBATCH options that differ from the template, by name; None for an option without a value."""
    fewest = 1 if job.min_nodes is None else job.min_nodes
    if not 1 <= fewest <= job.nodes:
        raise LaunchError(f"--nodes ({job.nodes}) must be at least --min-nodes ({fewest}), which must be at least 1")
    wanted: dict[str, str | None] = {
        "job-name": folder.root.name,
        "nodes": f"{job.min_nodes}-{job.nodes}" if job.min_nodes else str(job.nodes),
        "cpus-per-task": str(whole_number("CPUS_PER_NODE", site.cpus_per_node, 1)),
        "time": check_time("--time", job.time) if job.time is not None else check_time("TIME", site.time),
        "output": _log_pattern(folder, job.sweep),
        "signal": f"USR2@{site.warn_seconds}",
        "chdir": str(Path.cwd()),
    }
    for name, value in (
        ("partition", site.partition),
        ("account", site.account),
        ("qos", site.qos),
        ("gpus-per-node", site.gpus_per_node),
        ("exclude", site.exclude),
        ("array", f"0-{len(job.sweep) - 1}" if job.sweep else ""),
    ):
        if value:
            wanted[name] = value
    return wanted | sbatch_options(shlex.split(site.sbatch_options)) | sbatch_options(job.sbatch)


def settings(job: JobOptions, site: Site, folder: RunFolder) -> dict[str, str]:
    """Return the values of the template's settings, by name, as shell text."""
    ranks = ranks_per_node(job, site)
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
        "RECIPE": shlex.quote(str(job.recipe.resolve())),
        "OVERRIDES": _array(job.overrides),
        "SWEEP": _array(job.sweep),
        "ALLOW": _array([*(f"--allow={name}" for name in job.allow), *(["--force"] if job.force else [])]),
        "RUN": shlex.quote(str(folder.root)),
        "PYTHON": shlex.quote(site.python or ("python3" if container else sys.executable)),
        "RANKS": _array(["--ranks", str(ranks)] if ranks else []),
        "NODE_SETUP": shlex.quote("; ".join(setup)) if setup else "",
        "SRUN": _array(srun),
        "WRAP": _array(wrap if site.apptainer_image else []),
        "HEALTH": _array(shlex.split(site.health_options)),
        "REQUEUE_LIMIT": str(job.requeue_limit),
        "STOP_SECONDS": str(max(10, whole_number("WARN_SECONDS", site.warn_seconds, 0) - 30)),
    }


def render(template: str, directives: Mapping[str, str | None], settings: Mapping[str, str]) -> str:
    """Return the template with these #SBATCH options and settings. Options that the template lacks are added to it."""
    added: list[str] = []
    for name, value in directives.items():
        line = directive(name, value)
        pattern = rf"^#SBATCH --{re.escape(name)}(=.*)?$"
        if re.search(pattern, template, re.MULTILINE):
            template = re.sub(pattern, lambda _, line=line: line, template, count=1, flags=re.MULTILINE)
        else:
            added.append(line)
    last = template.rindex("#SBATCH --")
    end = template.index("\n", last)
    template = template[:end] + "".join(f"\n{line}" for line in added) + template[end:]
    for name, value in settings.items():
        check_text(name, value)
        pattern = rf"^{name}=.*?(?=\s+# |$)"
        assert re.search(pattern, template, re.MULTILINE), name
        template = re.sub(pattern, lambda _, n=name, v=value: f"{n}={v}", template, count=1, flags=re.MULTILINE)
    return template


def _array(words: Sequence[str]) -> str:
    return f"({' '.join(shlex.quote(word) for word in words)})"
