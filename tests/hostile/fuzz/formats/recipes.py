"""Recipes, and the job scripts and manifests that are made of them."""

import json
from pathlib import Path
from typing import Any

from tests.hostile.fuzz.format import Codec, Consumer, Files, Format, RefusedError, command
from tests.hostile.fuzz.json_text import dumps

RECIPE: dict[str, Any] = {
    "name": "fuzz",
    "runs_dir": "/shared/runs",
    "model": {"vocab_size": 384, "seq_len": 32, "n_layers": 1, "n_heads": 2, "d_model": 16},
    "data": {"sources": [{"path": "/shared/data/set", "weight": 1.0}], "seed": 1},
    "optim": {"lr": 0.001, "warmup_steps": 1, "betas": [0.9, 0.95]},
    "train": {"steps": 4, "global_batch_size": 8, "micro_batch_size": 2, "eval_sequences": 0},
    "parallel": {"engine": "ddp", "device": "cpu"},
    "checkpoint": {"every": 2, "local_dir": "/dev/shm/tier"},
}
BOMB = b"a: &a [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    b"%c: &%c [*%c, *%c, *%c, *%c, *%c, *%c, *%c, *%c, *%c]\n" % (n + 1, n + 1, *[n] * 9) for n in range(97, 110)
)
TEXTS = (
    BOMB,
    b"a: &a {b: *a}\n",
    b"".join(b"key%d: 1\n" % n for n in range(50_000)),
    b"model: {" * 20_000,
    b"- " * 100_000,
    b"name: !!python/object/apply:os.system ['touch canary']\n",
    b"<<: [" + b"{a: 1}, " * 20_000 + b"]\n",
    b"? " * 10_000,
    b"name: " + b"x" * 10_000_000 + b"\n",
    b"name: 'a\nb'\n",
    b"%TAG ! tag:yaml.org,2002:python/\n---\nname: !object x\n",
    b"\xef\xbb\xbfname: x\n",
    b"\xff\xfen\0a\0",
    b"a: |\n" + b" x\n" * 500_000,
)
"""Texts of YAML that are hostile as a whole."""


def build_recipe(folder: Path) -> None:
    """A recipe as JSON, which YAML contains, and hostile texts beside it."""
    (folder / "recipe.yaml").write_bytes(dumps(RECIPE))


def _as_yaml(files: Files, name: str, tree: Any) -> dict[str, bytes]:
    return {name: dumps(tree, (", ", ": "))}


def loaded(folder: Path, out: Path) -> str:
    """The resolved recipe."""
    from train.config_file import load_recipe, recipe_as_yaml

    return recipe_as_yaml(load_recipe(folder / "recipe.yaml"))


def job_script(folder: Path, out: Path) -> str:
    """The shape of the job script: the number of its lines and its options of sbatch."""
    recipe = str(folder / "recipe.yaml")
    script = command("submit", recipe, "--dry-run", "--skip-data-check", "--nodes", "2", "--ranks", "2")
    lines = script.splitlines()
    options = [line.split("=")[0].split()[1] for line in lines if line.startswith("#SBATCH")]
    return f"{len(lines)} {options}"


def pods(folder: Path, out: Path) -> str:
    """The kinds of objects in the manifest for Kubernetes."""
    import yaml

    argv = ("--nodes", "2", "--gpus", "0", "--image", "i", "--claim", "c")
    text = command("kubernetes", str(folder / "recipe.yaml"), *argv)
    return repr([document["kind"] for document in yaml.safe_load_all(text)])


def build_machines(folder: Path) -> None:
    """The machines that Keepstep knows, as JSON."""
    import yaml

    known = Path("launch/plan/machines.yaml").resolve().read_bytes()
    (folder / "machines.yaml").write_bytes(dumps(yaml.safe_load(known)))


def machines(folder: Path, out: Path) -> str:
    """The machines of a file that `keepstep plan --machines` names."""
    from launch.plan.machine import _read

    return repr(sorted(_read(folder / "machines.yaml")))


def build_faults(folder: Path) -> None:
    """The value of KEEPSTEP_FAULTS, as a file."""
    fault = {"fault": "kill", "rank": 1, "step": 7, "phase": "forward"}
    (folder / "faults.json").write_bytes(dumps({"marks": "marks", "faults": [fault, fault]}))


def injected(folder: Path, out: Path) -> str:
    """The faults that a rank would inject, none of which is due."""
    from train.health.injected_faults import VARIABLE, FaultInjector

    if (folder / "faults.json").is_file() and not (folder / "faults.json").is_symlink():
        with (folder / "faults.json").open("rb") as file:
            text = file.read(1 << 20).decode("utf-8", "surrogateescape")
        FaultInjector({VARIABLE: text}, 1, out).inject("in no phase", 0)
    return "none is due"


FORMATS = [
    Format(
        "machines",
        build_machines,
        [("machines.yaml", Codec(json.loads, _as_yaml))],
        [Consumer("machines", machines, exact=False)],
        "everything: the file is the user's",
        texts=TEXTS,
    ),
    Format(
        "faults",
        build_faults,
        [("faults.json", Codec(json.loads, _as_yaml))],
        [Consumer("inject", injected, exact=False)],
        "everything: the variable is for tests",
    ),
    Format(
        "recipe",
        build_recipe,
        [("recipe.yaml", Codec(json.loads, _as_yaml))],
        [
            Consumer("load", loaded, exact=False),
            Consumer("submit", job_script, errors=(RefusedError,)),
            Consumer("kubernetes", pods, errors=(RefusedError,)),
        ],
        "settings: the file is the user's; none adds a line or an option to a job script",
        texts=TEXTS,
    ),
]
