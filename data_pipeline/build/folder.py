"""The folders of a build: its work folder, and the output, which gets its name once it is complete."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_pipeline.atomic_file import write_atomic
from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import FILES, NAME, Manifest
from data_pipeline.shards.manifest_file import parse_manifest, write_manifest
from data_pipeline.shards.manifest_rules import problem_of
from data_pipeline.tokenizers.tokenizer import TOKENIZER_FILES
from data_pipeline.untrusted import parse_json, read_file, safe_path


def work_folder(out: Path) -> Path:
    """The folder of intermediate files, beside the output."""
    return out.with_name(out.name + ".work")


def building_folder(out: Path) -> Path:
    """The folder that is renamed to `out` at the end."""
    return out.with_name(out.name + ".building")


def tokenizer_folder(work: Path, plan_hash: str) -> Path:
    """The tokenizer's folder in the work folder. Its name has the plan's hash: an abandoned build may have left
    another tokenizer there."""
    return work / f"tokenizer-{plan_hash}"


def finished(out: Path, plan_hash: str, earlier: Callable[[Manifest, int], bool] | None = None) -> Manifest | None:
    """The manifest of `out` if a build of this plan finished; None if `out` does not exist.

    `earlier` decides about other data sets, given the manifest and when it was written, in nanoseconds: whether an
    earlier version built the same. DataError if `out` is anything else."""
    if not out.exists():
        return None
    if not (out / NAME).is_file():
        raise DataError(f"{out} exists and is not a data set; choose another --out")
    manifest = parse_manifest(read_file(out / NAME), str(out))
    if manifest.plan != plan_hash and not (earlier and earlier(manifest, (out / NAME).stat().st_mtime_ns)):
        raise DataError(
            f"{out} is a data set of other inputs or options; choose another --out, or delete it (inputs and filters "
            f"that were edited count as others)"
        )
    shutil.rmtree(work_folder(out), ignore_errors=True)
    return manifest


def begin(out: Path, plan_hash: str, content: dict[str, Any], tokenizer: dict[str, bytes]) -> Path:
    """The work folder of the plan: a new one, or that of an interrupted build of the same plan.

    DataError if an interrupted build of another plan has finished tasks there."""
    work = work_folder(out)
    folder = tokenizer_folder(work, plan_hash)
    folder.mkdir(parents=True, exist_ok=True)
    plan_file = work / "plan.json"
    if os.path.lexists(plan_file):
        begun_hash, begun = _begun(plan_file)
        if begun_hash != plan_hash and any(work.glob("task-*.json")):
            changed = [name for name in content if begun.get(name) != content[name]]
            raise DataError(
                f"{work} contains an unfinished build with other {' and '.join(changed)}; repeat that command to "
                f"finish it, delete {work}, or choose another --out"
            )
    for name, data in tokenizer.items():
        write_atomic(safe_path(folder, name, TOKENIZER_FILES), data)
    write_atomic(plan_file, json.dumps({"hash": plan_hash, "content": content}).encode())
    return work


def _begun(plan_file: Path) -> tuple[str, dict[str, Any]]:
    """Hash and content of the plan in the work folder. DataError if the file is damaged."""
    try:
        begun: dict[str, Any] = parse_json(read_file(plan_file))
        return begun["hash"], {**begun["content"]}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"{plan_file} is damaged ({str(error)[:200]!r}), so the unfinished build there is not known; delete "
            f"{plan_file.parent}, or choose another --out"
        ) from None


def delete_if_empty(out: Path, work: Path) -> None:
    """Deletes the folders of a build that failed before it had any tokens."""
    if not any(file.stat().st_size for file in work.glob("task-*.tokens")):
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(building_folder(out), ignore_errors=True)


def finish(out: Path, work: Path, manifest: Manifest, files: bytes) -> None:
    """Completes the output folder, renames it to `out`, and deletes the work folder. `files`: content of files.json."""
    building = building_folder(out)
    if (problem := problem_of(manifest)) is not None:  # of a repacked data set, whose counts were damaged
        raise DataError(f"{out} cannot be finished: {problem}; build the data set again from its inputs")
    for partial in building.rglob("*.partial"):  # left by a process that was killed
        partial.unlink()
    (building / "tokenizer").mkdir(exist_ok=True)
    for name in manifest.tokenizer:
        content = read_file(tokenizer_folder(work, manifest.plan) / name)
        write_atomic(safe_path(building / "tokenizer", name, TOKENIZER_FILES), content)
    write_atomic(building / FILES, files)
    write_manifest(building, manifest)
    for folder in (*(path for path in building.iterdir() if path.is_dir()), building):
        _sync_folder(folder)
    building.rename(out)
    _sync_folder(out.parent)
    shutil.rmtree(work, ignore_errors=True)  # a repeated command that finds `out` deletes it as well


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
