"""Paths within a run's folder."""

from dataclasses import dataclass
from pathlib import Path

from train.config import Recipe
from train.errors import ConfigError

MAY_DIFFER = ("schedule", "optimizer", "dropout", "seed", "batch_size", "data_weights")
"""Parts of a recipe that `--allow` lets differ from the checkpoint that a run resumes from. Each difference is recorded
in events.jsonl."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, and the paths in it. Nothing is created or read here."""

    root: Path

    @classmethod
    def of(cls, recipe: Recipe) -> "RunFolder":
        """The folder that the recipe names, `runs_dir`/`name`. ConfigError if it is a link that leads to itself."""
        root = Path(recipe.runs_dir) / recipe.name
        try:
            root.resolve()
        except (OSError, RuntimeError):  # RuntimeError before Python 3.13
            raise ConfigError(f"runs_dir={recipe.runs_dir}: {root} is a link that leads to itself; remove it") from None
        return cls(root)

    @property
    def recipe(self) -> Path:
        """The resolved recipe of the last start."""
        return self.root / "recipe.yaml"

    @property
    def metrics(self) -> Path:
        """One record for each step and each evaluation."""
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """One record for each event, such as a start, a save or a failure."""
        return self.root / "events.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard files."""
        return self.root / "tensorboard"

    @property
    def sinks(self) -> Path:
        """Folder of the files of the other sinks (`train.sinks`)."""
        return self.root / "sinks"

    @property
    def tasks(self) -> Path:
        """Folder of the results of tasks, `step-N.json` for each evaluation."""
        return self.root / "tasks"

    @property
    def profiles(self) -> Path:
        """Folder of the profiles, `step-N` for each."""
        return self.root / "profiles"

    @property
    def profile_request(self) -> Path:
        """A file that `keepstep profile` creates. A run that finds it profiles its next steps and removes it."""
        return self.root / "PROFILE"

    @property
    def logs(self) -> Path:
        """Folder of the ranks' logs and stacks."""
        return self.root / "logs"

    @property
    def checkpoints(self) -> Path:
        """Folder of the shared tier's checkpoints."""
        return self.root / "checkpoints"

    @property
    def lease(self) -> Path:
        """The process that currently runs in the folder (`train.health.lease`)."""
        return self.root / "lease.json"

    @property
    def status(self) -> Path:
        """Phase and location of each rank, rewritten every ten seconds (`train.health.watchdog`)."""
        return self.root / "status.json"

    @property
    def stop_request(self) -> Path:
        """A file that `keepstep stop` creates. A run that finds it saves a checkpoint and stops."""
        return self.root / "STOP"


def run_of_checkpoint(checkpoint: Path) -> RunFolder:
    """The folder of the run to which a checkpoint belongs.

    Relies on the checkpoint being where the run saved it, at RUN/checkpoints/step-N: a checkpoint that was copied
    elsewhere does not record its run."""
    return RunFolder(checkpoint.resolve().parents[1])
