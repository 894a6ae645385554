"""The result of a sweep: its runs from the best to the worst, as a table and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launch.sweeps.grid import Combination
from launch.sweeps.runs import Ending, Outcome, cause_of
from launch.terminal import print_table, visible

VALIDATION, TRAINING = "validation_loss", "train_loss"


@dataclass(frozen=True)
class SweepReport:
    """The runs of a sweep: the finished ones from the best to the worst, then the others in the order of the sweep."""

    settings: Sequence[str]
    """Dotted names of the swept settings."""
    metric: str
    """What finished runs are compared by: `validation_loss` if all of them have one, else `train_loss`."""
    rows: Sequence[tuple[Combination, Outcome]]

    @property
    def best(self) -> str | None:
        """Name of the best run; None if no run has finished."""
        first = self.rows[0][1]
        return first.run.recipe.name if loss_of(first.ending, self.metric) is not None else None

    def as_json(self) -> dict[str, Any]:
        """The report as plain values."""
        runs = [
            {
                "name": outcome.run.recipe.name,
                "folder": str(outcome.run.folder.root),
                "settings": dict(combination.values),
                **vars(outcome.ending),
            }
            for combination, outcome in self.rows
        ]
        return {"metric": self.metric, "best": self.best, "runs": runs}


def loss_of(ending: Ending, metric: str) -> float | None:
    """The loss of a finished run by this metric."""
    return ending.validation_loss if metric == VALIDATION else ending.train_loss


def metric_of(outcomes: Sequence[Outcome]) -> str:
    """What these runs can be compared by: the validation loss, if all that finished have one."""
    finished = [outcome.ending for outcome in outcomes if outcome.ending.state == "finished"]
    return VALIDATION if all(ending.validation_loss is not None for ending in finished) else TRAINING


def report_of(combinations: Sequence[Combination], outcomes: Sequence[Outcome]) -> SweepReport:
    """The report on these runs, one for each combination."""
    metric = metric_of(outcomes)

    def place(row: tuple[Combination, Outcome]) -> float:
        loss = loss_of(row[1].ending, metric)
        return float("inf") if loss is None or loss != loss else loss

    rows = sorted(zip(combinations, outcomes, strict=True), key=place)
    return SweepReport(list(combinations[0].values), metric, rows)


def print_sweep(report: SweepReport) -> None:
    """Print the table, the best run, and why runs failed."""
    title = "validation loss" if report.metric == VALIDATION else "training loss"
    rows: list[list[str]] = []
    for combination, outcome in report.rows:
        loss = loss_of(outcome.ending, report.metric)
        shown = "" if loss is None else f"{loss:.4f}"
        values = [combination.values[key] for key in report.settings]
        rows.append([outcome.run.recipe.name, *values, outcome.ending.state, str(outcome.ending.step), shown])
    print_table(["run", *(f">{key}" for key in report.settings), "state", ">step", f">{title}"], rows)
    if report.best is not None:
        best = report.rows[0][1]
        print(f"\nbest: {report.best} ({title} {rows[0][-1]} nats per token), in {best.run.folder.root}")
    print_failures([outcome for _, outcome in report.rows])


def print_failures(outcomes: Sequence[Outcome]) -> None:
    """Name the runs that failed, each with its cause."""
    for outcome in outcomes:
        if outcome.ending.state == "failed":
            print(visible(f"failed: {outcome.run.recipe.name}: {cause_of(outcome.run)}"))
