"""Tasks of lm-evaluation-harness: which ones are meant, and their results for a model.

A task is named as the harness names it, or by a folder with task files (YAML), which stands for all tasks in it.
"""

import difflib
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.atomic_file import write_atomic
from data_pipeline.tokenizers.tokenizer import Tokenizer
from data_pipeline.untrusted import in_one_line
from train.errors import ConfigError
from train.evaluation.queries import Model

PREFIX = "task/"
"""Beginning of the names of results among metrics: `task/TASK/METRIC`."""


@dataclass(frozen=True)
class Tasks:
    """Tasks with their data, ready to be evaluated as often as wanted."""

    loaded: Mapping[str, Any]
    """What the harness's `TaskManager.load` returned."""

    @property
    def names(self) -> list[str]:
        """The names of all single tasks."""
        return sorted(self.loaded["tasks"])


@dataclass(frozen=True)
class Results:
    """Values by task and metric. Groups of tasks are among the tasks."""

    values: Mapping[str, Mapping[str, float]]
    examples: Mapping[str, int]
    """Number of examples by task."""

    @property
    def metrics(self) -> dict[str, float]:
        """The values for metrics.jsonl."""
        return {f"{PREFIX}{task}/{name}": value for task, own in self.values.items() for name, value in own.items()}

    def write(self, file: Path, **facts: Any) -> None:
        """Write the results and some facts about them as JSON."""
        file.parent.mkdir(parents=True, exist_ok=True)
        document = {**facts, "results": self.values, "examples": self.examples, "lm_eval": harness_version()}
        write_atomic(file, json.dumps(document, indent=2).encode() + b"\n")


def harness_version() -> str:
    """The version of lm-evaluation-harness. ConfigError if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("lm-eval")
    except PackageNotFoundError:
        raise ConfigError(
            "tasks need lm-evaluation-harness, which is not installed; install it: pip install 'keepstep[lm-eval]'"
        ) from None


def load_tasks(wanted: Sequence[str]) -> Tasks:
    """Load tasks and their data, which may be fetched from the network.

    ConfigError if the harness is not installed, or if a task is unknown or cannot be loaded."""
    harness_version()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    import datasets
    from lm_eval.tasks import TaskManager

    datasets.disable_progress_bars()
    folders = [name for name in wanted if Path(name).is_dir()]
    others = [name for name in wanted if name not in folders]
    names: list[str] = list(others)
    for folder in folders:
        found = _in_one_line(folder, lambda folder=folder: TaskManager(include_path=folder, include_defaults=False))
        names += sorted(found.all_subtasks)
        if not found.all_subtasks:
            raise ConfigError(f"{folder} has no task files; a task is a .yaml file with the setting task")
    manager = _in_one_line("the tasks", lambda: TaskManager(include_path=[*folders], include_defaults=bool(others)))
    for name in others:
        if name not in manager.task_index:
            near = difflib.get_close_matches(name, manager.all_tasks, 3)
            hint = f"did you mean {' or '.join(near)}?" if near else "`lm-eval ls tasks` lists them"
            raise ConfigError(f"there is no task {name!r}, and no folder of this name; {hint}")
    loaded = _in_one_line(", ".join(names), lambda: manager.load(names))
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(1234)  # as the harness's own command does
    return Tasks(loaded)


def _in_one_line(what: str, load: Any) -> Any:
    """What `load` returns. The harness and the library `datasets` raise errors of any type for bad files."""
    try:
        return load()
    except Exception as error:
        raise ConfigError(
            f"{what} cannot be loaded: {type(error).__name__}: {in_one_line(error)}; check the task files and, for "
            "data from a hub, the network"
        ) from error


def evaluate_tasks(model: Model, tokenizer: Tokenizer, seq_len: int, tasks: Tasks, limit: int | None) -> Results:
    """The results of a model on the first `limit` examples of each task; None: on all."""
    from lm_eval.evaluator import evaluate

    from train.evaluation.language_model import KeepstepLM

    lm = KeepstepLM(model, tokenizer, seq_len)
    with _without_bars():
        found: Any = evaluate(lm, dict(tasks.loaded), limit=limit, bootstrap_iters=0, log_samples=False)
    values = {task: _numbers(own) for task, own in found["results"].items()}
    examples = {task: int(count["effective"]) for task, count in found["n-samples"].items()}
    return Results({task: own for task, own in values.items() if own}, examples)


@contextmanager
def _without_bars() -> Iterator[None]:
    """A context in which the harness shows no progress bars of its own, which logs would keep."""
    from lm_eval.api import task

    shown, task.tqdm = task.tqdm, lambda items, **_: items
    try:
        yield
    finally:
        task.tqdm = shown


def _numbers(own: Mapping[str, Any]) -> dict[str, float]:
    """The finite metrics of a task, without standard errors. The harness names them `METRIC,FILTER`."""
    kept = {name: value for name, value in own.items() if isinstance(value, int | float) and "," in name}
    return {
        name.removesuffix(",none"): float(value)
        for name, value in kept.items()
        if "_stderr" not in name and math.isfinite(value)
    }
