"""`keepstep prove --replay RUN --step N`: train a step of a run again from the checkpoint before it, and compare bits.

With the same software and layout, a step that gives other bits was computed on faulty hardware, then or now. If the run
has a checkpoint of the step, the ranks whose part of it differs are named.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launch.proof.trial import Trial, checkpoint_folder, curve, newest_step_up_to, world_size
from parallel.errors import LaunchError
from train.checkpoint.format.verify import read_manifest
from train.checkpoint.stores.local import LocalFolder
from train.errors import ConfigError
from train.exit_codes import FINISHED, STOPPED
from train.run_folder import RunFolder


@dataclass(frozen=True)
class Replay:
    """The comparison of a run with some of its steps trained again."""

    run: str
    start: int
    """Step of the checkpoint from which the replay started."""
    step: int
    """Last step that was trained again."""
    different_steps: list[int]
    """Steps whose loss or gradient norm differs."""
    different_ranks: list[int] | None
    """Ranks whose part of the checkpoint differs; None if the run has no checkpoint of `step`."""

    @property
    def passed(self) -> bool:
        """Whether every bit that was compared is equal."""
        return not (self.different_steps or self.different_ranks)

    def as_json(self) -> dict[str, Any]:
        """Return the fields and `passed`."""
        return {"passed": self.passed, **asdict(self)}

    def as_text(self) -> str:
        """Return the verdict in a few lines."""
        lines = [
            f"{self.run}: steps {self.start + 1} to {self.step} trained again from the checkpoint of step {self.start}"
        ]
        if self.different_steps:
            wrong = self.different_steps[0]
            lines.append(f"losses or gradient norms differ from step {wrong} on: a wrong computation, then or now")
        else:
            lines.append("losses and gradient norms are the same, bit for bit")
        if self.different_ranks is None:
            lines.append(f"weights and moments are not compared: the run has no checkpoint of step {self.step}")
        elif self.different_ranks:
            lines.append(f"the weights or moments that rank {', '.join(map(str, self.different_ranks))} saved differ")
        else:
            lines.append("weights and moments are the same, bit for bit")
        return "\n".join(lines)


def replay(run: Path, step: int | None, out: Path) -> Replay:
    """Train the steps up to `step` again in `out`. ConfigError for wrong options, LaunchError if the run fails."""
    if step is None or step < 1:
        raise ConfigError(f"--replay needs --step N, a step of {run} from 1 on")
    recipe = RunFolder(run).recipe
    if not recipe.exists():
        raise ConfigError(f"--replay ({run}) is not a run's folder: it has no recipe.yaml")
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    again = Trial(str(recipe.resolve()), "replay", out, [f"runs_dir={out / 'runs'}"], world_size(run) // nodes)
    start = newest_step_up_to(run, step - 1)
    target = again.checkpoint(start)
    target.parent.mkdir(parents=True)
    shutil.copytree(checkpoint_folder(run, start), target)
    stop = {"fault": "term", "rank": 0, "step": step, "phase": "data"}
    again.train([stop], max_restarts=0, ends=(FINISHED, STOPPED))
    compared = ("loss", "grad_norm")
    steps = different_steps(curve(run, *compared), again.curve(*compared), start + 1, step)
    saved = checkpoint_folder(run, step)
    ranks = different_ranks(saved, again.checkpoint(step)) if saved.exists() else None
    return Replay(str(run), start, step, steps, ranks)


def different_steps(
    one: Mapping[int, tuple[float, ...]], two: Mapping[int, tuple[float, ...]], first: int, last: int
) -> list[int]:
    """Return the steps from `first` to `last` whose metrics differ. LaunchError if one is missing."""
    missing = [step for step in range(first, last + 1) if step not in one or step not in two]
    if missing:
        raise LaunchError(f"no metrics of the steps {missing}, so there is nothing to compare; choose another step")
    return [step for step in range(first, last + 1) if one[step] != two[step]]


def different_ranks(one: Path, two: Path) -> list[int]:
    """Return the ranks that wrote different bytes of the training state into two checkpoints with the same layout."""
    first, second = (read_manifest(LocalFolder(path))[0] for path in (one, two))
    ranks: set[int] = set()
    for name in first.state_names:
        others = {(piece.offsets, piece.sizes): piece.checksums for piece in second.pieces[name]}
        for piece in first.pieces[name]:
            if others.get((piece.offsets, piece.sizes)) != piece.checksums:
                ranks.add(int(piece.file.split("-")[1].split(".")[0]))
    return sorted(ranks)
