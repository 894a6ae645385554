"""The tables of the report as HTML. Each text of a run is escaped."""

import html
from collections.abc import Sequence

from launch.report.documents import documents_of
from launch.report.run_data import BAD_STEPS, RunData
from launch.terminal import duration, local_time, size, visible
from train.records.goodput import Account

KINDS = {
    "step": "steps that were kept",
    "data_wait": "waiting for data",
    "checkpoint_stall": "stalled by checkpoints",
    "evaluation": "evaluation",
    "profile": "profiling",
    "start": "starting",
    "compile": "compiling",
    "lost_work": "lost work",
    "down": "down between attempts",
}
"""Kinds of time (`train.records.goodput.ORDER`) as people read them."""
SHOWN = 200
"""Rows that a table of events has at most."""


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    """Return a table. A column whose name begins with ">" is aligned to the right. Nothing without rows."""
    if not rows:
        return ""
    kinds = [' class="number"' if name.startswith(">") else "" for name in columns]
    heads = (
        f'<th scope="col"{kind}>{_text(name.removeprefix(">"))}</th>' for name, kind in zip(columns, kinds, strict=True)
    )
    body = (
        "<tr>" + "".join(f"<td{kind}>{_text(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(caption)}"><table><caption>{_text(caption)}'
        f"</caption><thead><tr>{''.join(heads)}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def summary_table(runs: Sequence[RunData]) -> str:
    """Return one column for each run: how far it is, its losses, its goodput, its machines."""
    facts = [_facts(run) for run in runs]
    names = list(dict.fromkeys(name for each in facts for name in each))
    rows = [[name, *(each.get(name, "") for each in facts)] for name in names]
    return table(["", *(run.name for run in runs)], rows, "Summary")


def _facts(run: RunData) -> dict[str, str]:
    steps, spent = run.curve.steps, run.digest.spent
    facts: dict[str, str] = {}
    if steps:
        last = steps[-1]
        facts["last step"] = f"{last['step']:,}" + (f" of {int(wanted):,}" if (wanted := _steps(run)) else "")
        if "tokens" in last:
            facts["tokens"] = f"{last['tokens']:,}"
        facts["loss"] = f"{last['loss']:.4f} nats per token" if "loss" in last else ""
    losses = [one for one in run.curve.evaluations if "validation_loss" in one]
    if losses:
        facts["validation loss"] = f"{losses[-1]['validation_loss']:.4f} at step {losses[-1]['step']:,}"
    facts["goodput"] = f"{spent.goodput:.1%} of {duration(spent.total)}"
    facts["attempts"] = f"{spent.attempts}"
    facts["steps kept, lost"] = f"{spent.kept_steps:,}, {spent.lost_steps:,}"
    facts["last ending"] = run.attempts[-1].words[:200] if run.attempts else ""
    if run.attempts:
        facts["ranks"], facts["engine"] = str(run.attempts[-1].world_size or ""), run.attempts[-1].engine
        facts["began"] = local_time(run.began)
        facts["environment"] = run.attempts[-1].environment
    facts["machines"] = _listed(run.hosts)
    return facts


def _steps(run: RunData) -> str:
    text = run.settings.get("train.steps", "")
    return text if text.isdecimal() and len(text) < 19 else ""


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def difference_table(runs: Sequence[RunData]) -> str:
    """Return the settings in which the recipes of the runs differ."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    rows = [[name, *(run.settings.get(name, "(not set)") for run in runs)] for name in names]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    return table(["setting", *(run.name for run in runs)], differing, "Differences of the recipes")


def event_tables(runs: Sequence[RunData]) -> list[str]:
    """Return, for each run, its account of time, attempts, bad steps and checkpoints, and its recipe."""
    parts: list[str] = []
    for run in runs:
        parts.append(f"<section><h2>{_text(run.name)}</h2>")
        parts += [time_table(run.digest.spent), _attempt_table(run), _bad_step_table(run), _checkpoint_table(run)]
        if run.recipe:
            parts.append(f"<details><summary>Recipe</summary><pre>{_text(run.recipe)}</pre></details>")
        parts.append("</section>")
    return parts


def time_table(spent: Account) -> str:
    """Return what the time was spent on."""
    total = spent.total or 1.0
    rows = [[KINDS[kind], duration(seconds), f"{seconds / total:.1%}"] for kind, seconds in spent.seconds.items()]
    return table(["spent on", ">time", ">share"], rows, "Time")


def _attempt_table(run: RunData) -> str:
    rows = [
        [str(one.number), local_time(one.began), duration(one.ended - one.began), str(one.world_size or ""), one.words]
        for one in run.attempts[-SHOWN:]
    ]
    return table([">attempt", "began", ">lasted", ">ranks", "ended"], rows, _caption("Attempts", len(run.attempts)))


def _bad_step_table(run: RunData) -> str:
    events = run.events(*BAD_STEPS)
    count = sum(run.digest.counts[kind] for kind in BAD_STEPS)
    rows: list[list[str]] = []
    for event in events[-SHOWN:]:
        first, samples, step = (event.get(name) for name in ("first_sample", "samples", "data_step"))
        known = isinstance(first, int) and isinstance(samples, int) and isinstance(step, int)
        documents = f"keepstep data trace {run.path} --data-step {step}" if known else ""
        numbers = f"{first} to {first + samples - 1}" if isinstance(first, int) and isinstance(samples, int) else ""
        rows.append([event["kind"], str(event.get("step", "")), str(event.get("why", "")), numbers, documents])
    columns = ["kind", ">after step", "cause", "samples", "command that shows their documents"]
    found = documents_of(run.path, events)
    names = [">global batch", ">sample", "file", ">document", "text"]
    return table(columns, rows, _caption("Bad steps", count)) + table(names, found, "Documents of the newest bad steps")


def _checkpoint_table(run: RunData) -> str:
    saves = run.events("saved")
    rows = [
        [str(one.get("step", "")), str(one.get("tier", "")), *_costs(one), local_time(one["time"])]
        for one in saves[-SHOWN:]
    ]
    columns = [">step", "tier", ">size", ">stall", ">written in", "time"]
    return table(columns, rows, _caption("Checkpoints", run.digest.counts["saved"]))


def _costs(save: dict[str, object]) -> list[str]:
    found: list[str] = []
    for name, words in (("bytes", size), ("stall_seconds", duration), ("seconds", duration)):
        value = save.get(name)
        found.append(words(value) if isinstance(value, int | float) else "")
    return found


def _caption(title: str, count: int) -> str:
    return f"{title} ({count:,})" if count <= SHOWN else f"{title} (the last {SHOWN} that were kept of {count:,})"


def _text(text: str) -> str:
    return html.escape(visible(text))
