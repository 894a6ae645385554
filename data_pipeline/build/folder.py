"""The folders of a build: where its work lies, and how the output gets its name once it is whole."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import FILES, NAME, Manifest, parse_manifest, write_manifest
from data_pipeline.whole_file import write_whole


def work_folder(out: Path) -> Path:
    return out.with_name(out.name + ".work")


def building_folder(out: Path) -> Path:
    return out.with_name(out.name + ".building")


def tokenizer_folder(work: Path, plan_hash: str) -> Path:
    """Of this plan alone: a build with another tokenizer may have been given up here."""
    return work / f"tokenizer-{plan_hash}"


def finished(out: Path, plan_hash: str) -> Manifest | None:
    if not out.exists():
        return None
    if not (out / NAME).is_file():
        raise DataError(f"{out} exists and is not a data set; choose another --out")
    manifest = parse_manifest((out / NAME).read_bytes(), str(out))
    if manifest.plan != plan_hash:
        raise DataError(f"{out} is a data set of other inputs or options; choose another --out, or delete it")
    shutil.rmtree(work_folder(out), ignore_errors=True)
    return manifest


def begin(out: Path, plan_hash: str, content: dict[str, Any], tokenizer: dict[str, bytes]) -> Path:
    """The work folder, new or of a build of the same plan."""
    work = work_folder(out)
    folder = tokenizer_folder(work, plan_hash)
    folder.mkdir(parents=True, exist_ok=True)
    plan_file = work / "plan.json"
    if plan_file.exists():
        begun = json.loads(plan_file.read_bytes())
        if begun["hash"] != plan_hash and any(work.glob("task-*.json")):
            changed = [name for name in content if begun["content"].get(name) != content[name]]
            raise DataError(
                f"{work} holds a build that was begun with other {' and '.join(changed)}; repeat that command to "
                f"finish it, delete {work}, or choose another --out"
            )
    for name, data in tokenizer.items():
        write_whole(folder / name, data)
    write_whole(plan_file, json.dumps({"hash": plan_hash, "content": content}).encode())
    return work


def drop_if_worthless(out: Path, work: Path) -> None:
    """Leave nothing behind of a build that failed before it had any tokens."""
    if not any(file.stat().st_size for file in work.glob("task-*.tokens")):
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(building_folder(out), ignore_errors=True)


def finish(out: Path, work: Path, manifest: Manifest, addresses: Sequence[str]) -> None:
    """Complete the folder, give it its name, and drop the work."""
    building = building_folder(out)
    for left_over in building.rglob("*.partial"):  # by a process that was killed
        left_over.unlink()
    (building / "tokenizer").mkdir(exist_ok=True)
    for name in manifest.tokenizer:
        write_whole(building / "tokenizer" / name, (tokenizer_folder(work, manifest.plan) / name).read_bytes())
    write_whole(building / FILES, json.dumps(list(addresses), indent=0).encode())
    write_manifest(building, manifest)
    for folder in (building / "tokenizer", building / "shards", building):
        _sync_folder(folder)
    building.rename(out)
    _sync_folder(out.parent)
    shutil.rmtree(work)


def _sync_folder(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
