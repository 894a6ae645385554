"""Where a run stands: steps done, batches passed over, tokens seen."""

from dataclasses import dataclass, replace
from typing import Any

from train.checkpoint.load import Progress


@dataclass(frozen=True)
class Place:
    """`step` counts finished optimizer steps; `skipped` counts batches that moved nothing."""

    step: int = 0
    skipped: int = 0
    tokens: int = 0
    held_out_loss: float | None = None
    """At this step, if it was evaluated."""

    @property
    def data_step(self) -> int:
        """How many global batches have been taken from the stream."""
        return self.step + self.skipped

    def after_step(self, tokens: int) -> "Place":
        return replace(self, step=self.step + 1, tokens=self.tokens + tokens, held_out_loss=None)

    def after_skip(self) -> "Place":
        return replace(self, skipped=self.skipped + 1)

    def evaluated(self, held_out_loss: float) -> "Place":
        return replace(self, held_out_loss=held_out_loss)

    def as_progress(self, **extra: Any) -> Progress:
        """As a checkpoint keeps it, with what else it must remember (JSON)."""
        return Progress(self.step, self.tokens, self.held_out_loss, {"skipped": self.skipped, **extra})

    @classmethod
    def of(cls, progress: Progress) -> "Place":
        return cls(progress.step, progress.extra["skipped"], progress.tokens, progress.held_out_loss)
