"""Tasks of lm-evaluation-harness by schedule, on the live weights of a run (`train.evaluations`)."""

import logging
import time
from functools import cache
from pathlib import Path

from data_pipeline.tokenizers.tokenizer import Tokenizer, load_tokenizer
from train.checkpoint.stores.steps import step_name
from train.evaluation.answering import LiveModel, TasksStoppedError
from train.evaluation.tasks import Results, Tasks, evaluate_tasks, load_tasks
from train.run import Run
from train.run_folder import RunFolder

log = logging.getLogger(__name__)


def prepare_tasks(names: tuple[str, ...]) -> None:
    """Load the tasks and their data before the first step. ConfigError if that fails. Call on rank 0 only."""
    if names:
        _tasks(names)


@cache
def _tasks(names: tuple[str, ...]) -> Tasks:
    return load_tasks(names)


@cache
def _tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def run_tasks_after_step(run: Run, step: int) -> None:
    """Evaluate the tasks of the recipe, and write what was found. Collective."""
    settings = run.recipe.train.evaluations
    began = time.perf_counter()
    batch_size = settings.batch_size or run.recipe.train.micro_batch_size
    model = LiveModel(run, step, run.stream.vocab_size, batch_size)
    try:
        if run.runtime.world.rank != 0:
            model.serve()
            return
        tokenizer = _tokenizer(run.stream.tokenizer_dir)
        results = evaluate_tasks(model, tokenizer, run.recipe.model.seq_len, _tasks(settings.tasks), settings.limit)
        model.finish()
    except TasksStoppedError:
        log.info("the tasks after step %d are left out, because the run was asked to stop", step)
        return
    _write(run, step, results)
    log.info("step %d  %s (%.1f s)", step, _shown(results), time.perf_counter() - began)


def _write(run: Run, step: int, results: Results) -> None:
    run.metrics.write_evaluation(step, results.metrics)
    file = RunFolder.of(run.recipe).tasks / f"{step_name(step)}.json"
    results.write(file, step=step, weights="live", limit=run.recipe.train.evaluations.limit)


def _shown(results: Results) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in results.metrics.items())
