"""What a run tells while it goes: metrics.jsonl, TensorBoard, and a progress line.

Only rank 0 writes. On a terminal the line is redrawn at every step; in a log whole lines come every `log_every` steps.
"""

import contextlib
import json
import logging
import resource
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from train.records.events import end_torn_line

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger(__name__)


class Metrics:
    """Writes one record a step; knows how fast the run goes."""

    def __init__(
        self, jsonl: Path, tensorboard: Path, *, first_step: int, total_steps: int, log_every: int, enabled: bool
    ) -> None:
        self._total_steps = total_steps
        self._log_every = log_every
        if enabled:
            end_torn_line(jsonl)
        self._file: IO[str] | None = jsonl.open("a", encoding="utf-8") if enabled else None
        self._tensorboard, self._first_step = tensorboard, first_step
        self._board: SummaryWriter | None = None
        self._terminal = sys.stderr.isatty()
        self._step_seconds: float | None = None

    def write(self, step: int, record: dict[str, Any], seconds: float) -> None:
        """`record` holds plain numbers; `seconds` is how long the step took."""
        if self._file is None:
            return
        self._append(step, record)
        previous = self._step_seconds
        self._step_seconds = seconds if previous is None else 0.9 * previous + 0.1 * seconds
        line = self._line(step, record)
        if self._terminal and step < self._total_steps:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        if step % self._log_every == 0 or step in (1, self._total_steps):
            print("\r\x1b[K" if self._terminal else "", end="", file=sys.stderr)
            log.info("%s", line)

    def write_evaluation(self, step: int, record: dict[str, float]) -> None:
        self._append(step, record)

    def _append(self, step: int, record: dict[str, Any]) -> None:
        """A full disk loses the record, not the run."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"time": round(time.time(), 3), "step": step, **record}) + "\n")
            self._file.flush()
            if self._board is None:
                self._board = self._open_board()
            for name, value in record.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(name, value, step)
        except OSError as error:
            log.warning("the metrics of step %d were not written: %s", step, error)

    def _open_board(self) -> "SummaryWriter":
        """After the first step, which need not wait for what TensorBoard imports."""
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._tensorboard), purge_step=self._first_step)

    def _line(self, step: int, record: dict[str, Any]) -> str:
        left = (self._total_steps - step) * (self._step_seconds or 0.0)
        return (
            f"step {step}/{self._total_steps}  loss {record['loss']:.4f}  lr {record['lr']:.2e}  "
            f"grad norm {record['grad_norm']:.3f}  {record['tokens_per_second']:,.0f} tokens/s  "
            f"{record['model_flops_per_second'] / 1e9:,.1f} GFLOP/s ({record['share_of_measured_peak']:.0%} of peak)  "
            f"{record['memory_gib']:.2f} GiB  {time.strftime('%H:%M:%S', time.gmtime(left))} left"
        )

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
            if self._board is not None:
                self._board.close()


def peak_memory_gib(device: torch.device) -> float:
    """Most memory this rank has held: the device's, or the process's on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
