"""The metrics of a run: metrics.jsonl, the sinks of the recipe, and progress lines.

Only rank 0 writes. Whole lines come every `log_every` steps. A terminal also has a live view (`live_view.py`).
"""

import contextlib
import json
import logging
import os
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from data_pipeline.untrusted import open_to_append
from train.health.exhausted import FULL, UNWRITABLE
from train.records.clock import uptime
from train.records.events import end_torn_line
from train.records.live_view import LiveView, time_left
from train.records.progress import Progress
from train.sinks.background import Sinks
from train.sinks.sink import figures_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Speed:
    """Turns the seconds of a step into speeds."""

    tokens_per_step: int
    flops_per_token: int
    """Model FLOPs of the forward and backward pass, without recomputation."""
    measured_peak: float
    """FLOP per second of a large matrix product, measured on all ranks and added up."""
    datasheet_peak: float | None
    """FLOP per second of all devices by their datasheets; None if unknown, as for CPUs."""

    def of_step(self, seconds: float) -> dict[str, float]:
        """Return tokens and FLOP per second, the share of the measured peak, and MFU if the datasheet peak is known.

        MFU: model FLOPs utilization (PaLM, Chowdhery et al. 2022, section 4.1)."""
        flops = self.flops_per_token * self.tokens_per_step / seconds
        speeds = {
            "tokens_per_second": self.tokens_per_step / seconds,
            "model_flops_per_second": flops,
            "share_of_measured_peak": flops / self.measured_peak,
        }
        return speeds if self.datasheet_peak is None else speeds | {"mfu": flops / self.datasheet_peak}


def step_record(
    progress: Progress,
    loss: float,
    lr: float,
    grad_norm: float,
    seconds: Mapping[str, float],
    speeds: Mapping[str, float],
) -> dict[str, Any]:
    """Return the record of a finished step. `seconds`: by kind since the record before."""
    return {
        "loss": loss,
        "lr": lr,
        "grad_norm": grad_norm,
        "tokens": progress.tokens,
        "data_step": progress.data_step,
        **speeds,
        "memory_gib": peak_memory_gib(),
        "seconds": dict(seconds),
        "uptime": round(uptime(), 3),
    }


class Metrics:
    """Writes one record a step, and estimates the time left."""

    def __init__(self, jsonl: Path, sinks: Sinks, *, total_steps: int, log_every: int, enabled: bool) -> None:
        self._total_steps = total_steps
        self._log_every = log_every
        self._file: IO[str] | None = _opened(jsonl) if enabled else None
        self._sinks = sinks
        self._view = LiveView(total_steps)
        self._step_seconds: float | None = None

    def write_step(self, step: int, record: dict[str, Any], seconds: float) -> None:
        """Write the record of a step (`step_record`) that took so many seconds, and show the progress line."""
        if self._file is None:
            return
        self._append(step, record)
        previous = self._step_seconds
        self._step_seconds = seconds if previous is None else 0.9 * previous + 0.1 * seconds
        if step % self._log_every == 0 or step in (1, self._total_steps):
            log.info("%s", self._line(step, record))
        self._view.show(step, record, self._step_seconds)

    def write_evaluation(self, step: int, record: dict[str, float]) -> None:
        """Write the result of an evaluation after a step."""
        self._append(step, record)

    def _append(self, step: int, record: dict[str, Any]) -> None:
        """Write to the file and to the sinks. If the disk is full, the record is lost, but the run continues."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"time": round(time.time(), 3), "step": step, **record}) + "\n")
            self._file.flush()
        except OSError as error:
            log.warning("the metrics of step %d were not written: %s", step, error)
        self._sinks.log(step, figures_of(record))

    def _line(self, step: int, record: dict[str, Any]) -> str:
        left = (self._total_steps - step) * (self._step_seconds or 0.0)
        return (
            f"step {step}/{self._total_steps}  loss {record['loss']:.4f}  lr {record['lr']:.2e}  "
            f"grad norm {record['grad_norm']:.3f}  {record['tokens_per_second']:,.0f} tokens/s  "
            f"{record['model_flops_per_second'] / 1e9:,.1f} GFLOP/s ({utilization(record)})  "
            f"{record['memory_gib']:.2f} GiB  {time_left(left)} left"
        )

    def close(self) -> None:
        """Close the file, the view and the sinks."""
        self._view.close()
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
        self._sinks.close()


def _opened(jsonl: Path) -> IO[str] | None:
    """Open metrics.jsonl to append to it; None, with a warning, if it is no file: a log never stops a run."""
    try:
        end_torn_line(jsonl)
        return os.fdopen(open_to_append(jsonl), "a", encoding="utf-8")
    except OSError as error:
        if error.errno in (*FULL, *UNWRITABLE):
            raise
        log.warning("no metrics are written: %s %s", jsonl, error.strerror)
        return None


def utilization(record: Mapping[str, Any]) -> str:
    """Return a record's MFU, or its share of the measured peak where the datasheet peak is not known."""
    if "mfu" in record:
        return f"MFU {record['mfu']:.1%}"
    return f"{record['share_of_measured_peak']:.0%} of measured peak"


def peak_memory_gib() -> float:
    """Return the most memory that this rank has held: of its CUDA device, or of the process without one."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
