"""Small corpora and data sets for the tests in this folder."""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_pipeline.build.prepare import BuildOptions, build_dataset
from data_pipeline.build.workers import Pool
from data_pipeline.config import DataConfig
from data_pipeline.progress import Advance
from data_pipeline.shards.manifest import NAME, Manifest, Shard, Split
from data_pipeline.shards.manifest_file import checksum_of

WORDS = re.findall(r"\w+", "the cat sat on a mat and saw how many dogs run in rain while birds sing of spring")


def documents(number: int, seed: int = 0, longest: int = 60) -> list[str]:
    """Texts of 1 to `longest` words, all different."""
    source = random.Random(seed)
    return [f"{n} {' '.join(source.choices(WORDS, k=source.randint(1, longest)))}\n" for n in range(number)]


def write_jsonl(path: Path, texts: Sequence[Any], key: str = "text") -> Path:
    """Writes one JSON object per text."""
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def build(folder: Path, texts: Sequence[str], tokenizer: Path, **options: Any) -> Manifest:
    """Builds a data set of these texts in `folder`, in this process."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    inputs = write_jsonl(folder.with_name(folder.name + ".jsonl"), texts)
    chosen = BuildOptions(**{"seq_len": 32, "block_bytes": 256, **options})
    manifest = build_dataset([str(inputs)], folder, tokenizer, chosen, pool=Pool(None))
    assert manifest is not None
    return manifest


def config(*folders: Path | str, **fields: Any) -> DataConfig:
    """The settings for training on these data sets, without prefetch. `mirror` is that of the first one."""
    weights = fields.pop("weights", [1.0] * len(folders))
    sources = [{"path": str(folder), "weight": weight} for folder, weight in zip(folders, weights, strict=True)]
    mirror = fields.pop("mirror", None)
    if mirror is not None:
        sources[0]["mirror"] = str(mirror)
    return DataConfig(**{"sources": sources, "prefetch_batches": 0, **fields})


def tree(folder: Path) -> dict[str, bytes]:
    """The content of all files below a folder, by path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Changes a data set's manifest and computes its hashes again, as someone who forges it would."""
    content = json.loads((folder / NAME).read_bytes())
    edit(content)
    if isinstance(content["splits"], dict):
        members = {name: value for name, value in content.items() if name not in ("format", "version", "fingerprint")}
        members.pop("xxh3", None)
        members["splits"] = {
            "validation" if name == "held_out" else name: Split(
                **{**split, "shards": [Shard(**shard) for shard in split["shards"]]}
            )
            for name, split in content["splits"].items()
        }
        members.pop("extra", None)
        content["fingerprint"] = Manifest(**members).fingerprint
    if content.pop("xxh3", None) is not None:
        content["xxh3"] = checksum_of(content)
    (folder / NAME).write_text(json.dumps(content))


def make_version_1(content: dict[str, Any]) -> None:
    """Removes from a manifest what the first versions did not have."""
    for name in ("hashes", "validation_below", "files_xxh3", "xxh3"):
        del content[name]
    content["version"] = 1


class Recorder:
    """A `Progress` that records the stages, their totals and the units done."""

    def __init__(self) -> None:
        self.totals: dict[str, float | None] = {}
        self.units: dict[str, str] = {}
        self.done: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    @contextmanager
    def __call__(self, description: str, total: float | None, unit: str) -> Iterator[Advance]:
        self.totals[description], self.units[description] = total, unit
        self.done[description], self.calls[description] = 0, 0

        def advance(amount: float) -> None:
            self.done[description] += amount
            self.calls[description] += 1

        yield advance
