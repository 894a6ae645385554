"""`keepstep prove --replay RUN --step N`: train a step of a run again from the checkpoint before it, and compare bits.

A step that comes out differently, with the same software and layout, was computed on faulty hardware then or now. If
the run has a checkpoint of the step, the ranks whose part of it differs are named.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from launch.proof.trial import Trial, newest_checkpoint, world_size
from parallel.errors import LaunchError
from train.checkpoint.format.verify import read_manifest
from train.checkpoint.stores.local import LocalFolder
from train.errors import ConfigError
from train.exit_codes import FAILED, FINISHED, STOPPED
from train.records.events import read_jsonl


def replay(run: Path, step: int | None, out: Path) -> int:
    if step is None or step < 1:
        raise ConfigError(f"--replay needs --step N, a step of {run} from 1 on")
    recipe = run / "recipe.yaml"
    if not recipe.exists():
        raise ConfigError(f"--replay ({run}) is not a run's folder: it has no recipe.yaml")
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    again = Trial(str(recipe.resolve()), "replay", out, [f"runs_dir={out / 'runs'}"], world_size(run) // nodes)
    start = newest_checkpoint(run, step - 1)
    target = again.checkpoint(start)
    target.parent.mkdir(parents=True)
    shutil.copytree(checkpoint_of(run, start), target)
    stop = {"fault": "term", "rank": 0, "step": step, "phase": "data"}
    again.train([stop], max_restarts=0, ends=(FINISHED, STOPPED))
    different = different_steps(curve(run), curve(again.folder), start + 1, step)
    saved = checkpoint_of(run, step)
    faulty = different_ranks(saved, again.checkpoint(step)) if saved.exists() else None
    print(verdict(run, start, step, different, faulty))
    return FAILED if different or faulty else FINISHED


def checkpoint_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def curve(run: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step; of a step that was done again, the last."""
    records = [record for record in read_jsonl(run / "metrics.jsonl") if "loss" in record]
    return {record["step"]: (record["loss"], record["grad_norm"]) for record in records}


def different_steps(
    one: Mapping[int, tuple[float, float]], two: Mapping[int, tuple[float, float]], first: int, last: int
) -> list[int]:
    missing = [step for step in range(first, last + 1) if step not in one or step not in two]
    if missing:
        raise LaunchError(f"no metrics of the steps {missing}, so there is nothing to compare")
    return [step for step in range(first, last + 1) if one[step] != two[step]]


def different_ranks(one: Path, two: Path) -> list[int]:
    """Ranks that wrote other bytes for the training state into two checkpoints of one layout."""
    first, second = (read_manifest(LocalFolder(path))[0] for path in (one, two))
    ranks = set()
    for name in first.state_names:
        others = {(piece.offsets, piece.sizes): piece.checksums for piece in second.pieces[name]}
        for piece in first.pieces[name]:
            if others.get((piece.offsets, piece.sizes)) != piece.checksums:
                ranks.add(int(piece.file.split("-")[1].split(".")[0]))
    return sorted(ranks)


def verdict(run: Path, start: int, step: int, different: list[int], faulty: list[int] | None) -> str:
    lines = [f"{run}: steps {start + 1} to {step} trained again from the checkpoint of step {start}"]
    if different:
        lines.append(f"losses or gradient norms differ from step {different[0]} on: computed wrongly then or now")
    else:
        lines.append("losses and gradient norms are the same, bit for bit")
    if faulty is None:
        lines.append(f"there is no checkpoint of step {step} to compare weights with")
    elif faulty:
        lines.append(f"the weights or moments that rank {', '.join(map(str, faulty))} saved differ")
    else:
        lines.append("weights and moments are the same, bit for bit")
    return "\n".join(lines)
