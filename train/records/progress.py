"""Where a run stands: steps done, batches passed over, tokens seen."""

from dataclasses import dataclass, replace
from typing import Any

from train.checkpoint.saved_state import SavedProgress


@dataclass(frozen=True)
class Progress:
    """`step` counts finished optimizer steps; `skipped` counts batches that moved nothing."""

    step: int = 0
    skipped: int = 0
    tokens: int = 0
    validation_loss: float | None = None
    """At this step, if it was evaluated."""

    @property
    def data_step(self) -> int:
        """How many global batches have been taken from the stream."""
        return self.step + self.skipped

    def after_step(self, tokens: int) -> "Progress":
        return replace(self, step=self.step + 1, tokens=self.tokens + tokens, validation_loss=None)

    def after_skip(self) -> "Progress":
        return replace(self, skipped=self.skipped + 1)

    def evaluated(self, validation_loss: float) -> "Progress":
        return replace(self, validation_loss=validation_loss)

    def as_saved(self, **extra: Any) -> SavedProgress:
        """As a checkpoint keeps it, with what else it must remember (JSON)."""
        return SavedProgress(self.step, self.tokens, self.validation_loss, {"skipped": self.skipped, **extra})

    @classmethod
    def of(cls, progress: SavedProgress) -> "Progress":
        return cls(progress.step, progress.extra["skipped"], progress.tokens, progress.validation_loss)
