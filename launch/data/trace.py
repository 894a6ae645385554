"""`keepstep data audit` and `keepstep data trace`: what a run read, recomputed from its recipe and checkpoints."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data_pipeline.stream.audit import Audit
    from train.config import Recipe


def add_audit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder, or a recipe that has not run")
    parser.add_argument(
        "--ranks", type=_numbers, default=(1, 2, 3, 4, 8), metavar="N,N", help="numbers of ranks (default: 1,2,3,4,8)"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="steps to walk (default: up to the newest checkpoint)")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def audit_run(options: argparse.Namespace) -> int:
    from data_pipeline.stream.audit import audit, plan_of

    recipe, states = _open(Path(options.run))
    size = recipe.train.global_batch_size
    steps = options.steps or (states[0]["step"] if states else recipe.train.steps)
    plan = plan_of(recipe.data, recipe.model.seq_len, size, states)
    print(describe_audit(audit(plan, steps * size, options.ranks, states), recipe))
    return 0


def describe_audit(result: "Audit", recipe: "Recipe") -> str:
    lines = [
        f"{result.samples:,} samples, the same on "
        f"{', '.join(str(size) for size in result.world_sizes)} ranks; no row twice in an epoch"
    ]
    for epoch in result.epochs:
        state = "complete, every row once" if epoch.complete else f"{epoch.rows - epoch.seen:,} rows to come"
        lines.append(
            f"  {recipe.data.sources[epoch.source].path}, epoch {epoch.epoch}: {epoch.seen:,} of {epoch.rows:,} rows, "
            f"{state}"
        )
    lines.append(
        "the counters of the newest checkpoint agree with the plan"
        if result.counters_compared
        else "no counters to compare with (no checkpoint at this step)"
    )
    return "\n".join(lines)


def add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder, or a recipe that has not run")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=int, metavar="N", help="optimizer step, counted from 1")
    which.add_argument(
        "--data-step", type=int, metavar="N", help="global batch, counted from 0, as events.jsonl names skipped ones"
    )
    parser.add_argument("--sample", type=int, metavar="K", help="only this place in the global batch, from 0")
    parser.add_argument("--characters", type=int, default=400, metavar="N", help="of each text; 0: all (default: 400)")


def trace_run(options: argparse.Namespace) -> int:
    from data_pipeline.errors import DataError
    from data_pipeline.stream.trace import trace

    folder = Path(options.run)
    recipe, states = _open(folder)
    if options.data_step is None and options.step < 1:
        raise DataError(f"--step ({options.step}) must be at least 1, the first optimizer step")
    if options.data_step is not None and options.data_step < 0:
        raise DataError(f"--data-step ({options.data_step}) must be at least 0, the first global batch")
    samples = trace(
        recipe.data,
        seq_len=recipe.model.seq_len,
        global_batch_size=recipe.train.global_batch_size,
        step=_data_step(folder, options.step) if options.data_step is None else options.data_step,
        wanted=None if options.sample is None else [options.sample],
        states=states,
    )
    for sample in samples:
        print(f"sample {sample.sample}: {sample.source}, epoch {sample.epoch}, row {sample.row}")
        for document in sample.documents:
            text = document.text[: options.characters] if options.characters else document.text
            more = "" if len(text) == len(document.text) else f" ... {len(document.text) - len(text)} characters more"
            print(
                f"  {document.file}, document {document.number}, from token {document.first_token}, "
                f"{document.tokens} tokens"
            )
            print("\n".join(f"    | {line}" for line in text.split("\n")) + more)
    return 0


def _data_step(folder: Path, step: int) -> int:
    """Which global batch an optimizer step used: a run may have passed over some."""
    from train.records.events import read_jsonl

    steps = {row["step"]: row["data_step"] - 1 for row in read_jsonl(folder / "metrics.jsonl") if "data_step" in row}
    return steps.get(step, step - 1)


def _open(path: Path) -> tuple["Recipe", list[dict[str, Any]]]:
    """The recipe, and the states of all ranks in the newest checkpoint, if there is one."""
    from train.checkpoint.format.manifest import MANIFEST, decode
    from train.checkpoint.stores.open import open_root
    from train.checkpoint.stores.protocol import read_all
    from train.config_file import load_recipe

    if path.is_file():
        return load_recipe(path), []
    recipe = load_recipe(path / "recipe.yaml")
    root = open_root(path / "checkpoints")
    steps = root.steps()
    if not steps:
        return recipe, []
    return recipe, decode(read_all(root.folder(max(steps)), MANIFEST)).rank_states
