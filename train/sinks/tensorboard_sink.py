"""TensorBoard: one folder of event files, whose curves continue over all attempts of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from train.sinks.resumable import SinkState
from train.sinks.sink import Figures


class TensorBoardSink:
    """Writes scalars, and the recipe as hyperparameters.

    A writer begins with the step from which TensorBoard drops what earlier writers wrote. So steps that are computed
    again appear once, and steps that the last attempt did not write are written first."""

    def __init__(self, folder: Path, state: SinkState, first_step: int, settings: Mapping[str, Any]) -> None:
        """`first_step`: the first one of this attempt. `settings`: those of the recipe, by dotted name."""
        self._state = state
        begins = 1 if not folder.is_dir() or not any(folder.iterdir()) else first_step  # where there is no state
        self.lacks_from = first_step = min(first_step, state.last_step or begins)
        self._folder, self._last = folder, first_step
        experiment, start, self._end = hparams(dict(settings), {"train/loss": 0.0, "validation/loss": 0.0})
        self._writer = self._writer_from(first_step)
        for summary in (experiment, start):
            self._add(summary)
        self._writer.flush()

    def log(self, step: int, figures: Figures) -> None:
        """Write the values of a step. After a roll-back, what was written from this step on is dropped."""
        if step < self._last:
            self._writer.close()
            self._writer = self._writer_from(step)
        self._last = step
        for tag, value in figures.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()
        self._state.sent(step, ("step",))

    def close(self) -> None:
        """End the session of the hyperparameters, and close the file."""
        self._add(self._end)
        self._writer.close()

    def _add(self, summary: Any) -> None:
        assert self._writer.file_writer is not None  # until it is closed
        self._writer.file_writer.add_summary(summary)

    def _writer_from(self, step: int) -> SummaryWriter:
        return SummaryWriter(str(self._folder), purge_step=step)
