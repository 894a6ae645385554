"""A run with everything that a report shows, written as a run writes it."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STEPS = 60


def metrics(lr: float) -> list[dict[str, Any]]:
    """An attempt that failed after step 40, and one that continued from step 30."""
    records: list[dict[str, Any]] = []
    for attempt, first, last in ((1, 1, 40), (2, 31, STEPS)):
        for step in range(first, last + 1):
            loss = 2 + 5 * math.exp(-lr * step) + (99 if (attempt, step) == (1, 35) else 0)
            records.append({
                "time": 1e9 + 100 * attempt + step, "step": step, "loss": loss, "lr": lr * 1e-3, "grad_norm": 1.0,
                "tokens": 64 * step, "data_step": step, "tokens_per_second": 5e4, "model_flops_per_second": 1e9,
                "share_of_measured_peak": 0.5, "mfu": 0.25, "memory_gib": 3.5, "uptime": step + 5.0,
                "loss/web": loss + 1, "loss/code": loss - 1, "attempt": attempt,
            })  # fmt: skip
            if step % 10 == 0:
                records.append({"time": 1e9 + 100 * attempt + step, "step": step, "validation_loss": loss + 0.5})
    return records


def events(words: str) -> list[dict[str, Any]]:
    def event(kind: str, time: float, uptime: float, **details: Any) -> dict[str, Any]:
        return {"time": 1e9 + time, "uptime": uptime, "kind": kind, **details}

    return [
        event("started", 100, 1, attempt=1, world_size=2, engine="ddp", previous=None),
        event("booked", 130, 31, step=30, seconds={"start": 1.0, "step": 25.0, "data_wait": 5.0}),
        event("saved", 130, 31, step=30, bytes=12345, stall_seconds=0.5, seconds=1.5, tier="shared", removed=[]),
        event("spike", 135, 36, step=34, why=words, data_step=34, first_sample=272, samples=8),
        event("failed", 141, 42, rank=1, exit_code=1, error=words),
        event(
            "started",
            200,
            1,
            attempt=2,
            world_size=2,
            engine="ddp",
            previous={"attempt": 1, "step": 40},
            device="cpu (x86_64)",
            versions={"torch": "2"},
        ),
        event("resumed", 201, 2, step=30, tokens=1920, took_seconds=1.0),
        event("finished", 231, 32, step=STEPS, reason=None, seconds={"start": 2.0, "step": 28.0, "evaluation": 2.0}),
    ]


def write_run(folder: Path, lr: float = 0.1, words: str = "out of memory") -> Path:
    """Writes the folder of a run."""
    folder.mkdir(parents=True)
    for name, records in (("metrics", metrics(lr)), ("events", events(words))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    settings = {"name": "x", "optim": {"lr": lr}, "train": {"steps": STEPS}}
    (folder / "recipe.yaml").write_text(json.dumps(settings) + f"\n# {words}\n")
    (folder / "logs/node-1").mkdir(parents=True)
    return folder


@pytest.fixture
def make_run() -> Callable[..., Path]:
    return write_run
