"""How far a run is: steps finished, batches skipped, tokens seen."""

from dataclasses import dataclass, replace
from typing import Any

from train.checkpoint.saved_state import SavedProgress


@dataclass(frozen=True)
class Progress:
    """The position of a run in its schedule and in its data."""

    step: int = 0
    """Optimizer steps finished."""
    skipped: int = 0
    """Batches that were skipped, so that they changed no weights."""
    tokens: int = 0
    """Tokens of the batches of finished steps."""
    validation_loss: float | None = None
    """Validation loss at this step in nats per token; None if it was not evaluated."""

    @property
    def data_step(self) -> int:
        """Global batches taken from the stream."""
        return self.step + self.skipped

    def after_step(self, tokens: int) -> "Progress":
        """Return the progress after one more optimizer step on so many tokens."""
        return replace(self, step=self.step + 1, tokens=self.tokens + tokens, validation_loss=None)

    def after_skip(self) -> "Progress":
        """Return the progress after one more batch was skipped."""
        return replace(self, skipped=self.skipped + 1)

    def evaluated(self, validation_loss: float) -> "Progress":
        """Return the progress with the validation loss of this step."""
        return replace(self, validation_loss=validation_loss)

    def as_saved(self, **extra: Any) -> SavedProgress:
        """Return what a checkpoint stores of it. `extra` (JSON) is stored as well."""
        return SavedProgress(self.step, self.tokens, self.validation_loss, {"skipped": self.skipped, **extra})

    @classmethod
    def of(cls, saved: SavedProgress) -> "Progress":
        """Return the progress that a checkpoint stores."""
        return cls(saved.step, saved.extra["skipped"], saved.tokens, saved.validation_loss)
