"""What lies where in a run's folder."""

from dataclasses import dataclass
from pathlib import Path

from train.config import Recipe

MAY_DIFFER = ("schedule", "data_weights")
"""What `--allow` lets differ from the checkpoint that a run goes on from; events.jsonl keeps what did."""


@dataclass(frozen=True)
class RunFolder:
    root: Path

    @classmethod
    def of(cls, recipe: Recipe) -> "RunFolder":
        return cls(Path(recipe.runs_dir) / recipe.name)

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def lease(self) -> Path:
        """Who runs here now."""
        return self.root / "lease.json"

    @property
    def status(self) -> Path:
        """Where each rank is, every ten seconds anew."""
        return self.root / "status.json"

    @property
    def stop_request(self) -> Path:
        """Made by `keepstep stop`; a run that sees it saves and stops."""
        return self.root / "STOP"
