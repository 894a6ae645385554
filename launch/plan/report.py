"""The plan as lines for people, and as values for programs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from launch.plan.estimate import Plan
from launch.plan.search import Setting
from launch.terminal import duration, print_facts, print_table, size

NAMES = {
    "products": "matrix products",
    "elementwise": "elementwise work",
    "launches": "kernel launches",
    "tensor": "tensor exchanges, exposed",
    "context": "context exchanges, exposed",
    "expert": "expert exchanges, exposed",
    "stages": "pipeline exchanges, exposed",
    "bubble": "pipeline bubble",
    "data": "data-parallel exchanges, exposed",
    "head": "output head and loss",
    "other": "everything else",
}


def print_plan(plan: Plan) -> None:
    """Print a plan by sections: memory, step, run, failures and storage."""
    print_table(("memory of a GPU", "GiB"), _rows(plan.memory.parts, 2**30, "{:.2f}", plan.memory.total))
    room = plan.machine.memory_bytes - plan.memory.total
    print(f"fullest in {plan.memory.moment}; {_fit(plan, room)}\n")
    parts = {NAMES.get(name, name): seconds for name, seconds in vars(plan.step).items()}
    print_table(("step", "ms"), _rows(parts, 1e-3, "{:.1f}", plan.step.total))
    print()
    reliability, gpus = plan.reliability, plan.arrangement.gpus
    facts = [
        ("tokens/s", f"{plan.tokens_per_second:,.0f}, {plan.tokens_per_second / gpus:,.0f} per GPU"),
        ("MFU", f"{plan.mfu:.1%} (causal FLOP)"),
        ("run", f"{plan.tokens:.3g} tokens, {plan.days:,.1f} days, {plan.gpu_hours:,.0f} GPU-hours"),
        ("failures", f"one in {duration(reliability.mean_seconds)}, {reliability.failures_per_day:.2g} a day"),
        ("checkpoint", f"{size(plan.checkpoint_bytes)}, best every {duration(reliability.interval_seconds)}"),
        ("goodput", f"{reliability.goodput:.1%}"),
        ("data", f"{size(plan.data_bytes_per_second)}/s"),
        ("host memory", f"{size(plan.staging_bytes)} per node of 8 GPUs, to stage a checkpoint"),
    ]
    if plan.cost is not None:
        facts.append(("cost", f"{plan.cost:,.0f}"))
    print_facts(facts)


def _fit(plan: Plan, room: float) -> str:
    kind = f"{plan.machine.memory_gb:g} GB"
    return f"fits {kind} with {size(room)} to spare" if room >= 0 else f"does NOT fit {kind}: {size(-room)} too much"


def _rows(parts: Any, unit: float, form: str, total: float) -> list[list[str]]:
    rows = [[name, form.format(value / unit)] for name, value in parts.items() if value]
    return [*rows, ["all", form.format(total / unit)]]


def print_changes(changes: Sequence[tuple[Setting, float]]) -> None:
    """Print the changes that would save most memory, as overrides to paste."""
    for setting, saved in changes:
        print(f"  {overrides(setting)} saves {size(saved)}")


def print_search(found: Sequence[tuple[Setting, Plan]], shown: int) -> None:
    """Print the best layouts, as overrides to paste."""
    rows = [
        [f"{plan.days:,.1f}", f"{plan.mfu:.1%}", f"{plan.memory.total / 2**30:.0f}", overrides(_differing(setting))]
        for setting, plan in found[:shown]
    ]
    print_table(("days", "MFU", "GiB", "overrides"), rows, f"{len(found)} layouts fit; the fastest:")


def print_scale(curve: Sequence[tuple[int, Plan]]) -> None:
    """Print the scale curve, with a bar for the speed of each GPU."""
    best = max((plan.tokens_per_second / gpus for gpus, plan in curve), default=1.0)
    rows: list[list[str]] = []
    for gpus, plan in curve:
        each = plan.tokens_per_second / gpus
        fits = "yes" if plan.fits else "no"
        bar = "#" * round(20 * each / best)
        rows.append([f"{gpus:,}", fits, f"{plan.tokens_per_second:,.0f}", f"{plan.days:,.1f}", f"{each:,.0f} {bar}"])
    print_table(("GPUs", "fits", "tokens/s", "days", "tokens/s per GPU"), rows)


def overrides(setting: Setting) -> str:
    """Settings as the command line takes them."""
    return " ".join(f"{name}={_text(value)}" for name, value in setting.items())


def _differing(setting: Setting) -> Setting:
    """Without the settings that candidates leave at their defaults."""
    default = {"parallel.replicate": 1, "parallel.shard": -1, "parallel.tensor": 1}
    hidden = ("checkpoint_every_k_blocks", "reshard_after_forward", "reduce_every_micro_batch", "cpu_offload")
    return {
        name: value
        for name, value in setting.items()
        if not name.endswith(hidden) and (name not in default or default[name] != value)
    }


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def as_document(plan: Plan) -> dict[str, Any]:
    """The plan as plain values, in bytes and seconds."""
    return {
        "fits": plan.fits,
        "memory_bytes": {**plan.memory.parts, "total": plan.memory.total},
        "step_seconds": {**asdict(plan.step), "total": plan.step.total},
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
        "tokens": plan.tokens,
        "days": plan.days,
        "gpu_hours": plan.gpu_hours,
        "cost": plan.cost,
        "failure_seconds": plan.reliability.mean_seconds,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "checkpoint_seconds": plan.reliability.interval_seconds,
        "goodput": plan.reliability.goodput,
        "staging_bytes": plan.staging_bytes,
        "data_bytes_per_second": plan.data_bytes_per_second,
    }
