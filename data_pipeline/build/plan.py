"""The plan of a build: what it reads and how, the same on every machine that takes part."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from data_pipeline.build.cleaning import QUALITY, filter_source
from data_pipeline.build.options import BuildOptions
from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import Manifest
from data_pipeline.shards.shard_file import ShardShape
from data_pipeline.sources.files import InputFile
from data_pipeline.sources.inputs import identity, list_inputs
from data_pipeline.sources.readers import cut_file
from data_pipeline.sources.records import ReadOptions, matches
from data_pipeline.sources.tasks import Task, divide_into_tasks

log = logging.getLogger(__name__)

_EARLIER_NAMES = {"validation_share": "held_out_share", QUALITY: "data_pipeline.cleaning:quality"}
"""Options and filters that were renamed -> the names under which they are hashed."""
_LATER_READ_OPTIONS = ("text_keys", "keep_carriage_returns")
"""Options that were added. They are hashed only if they are set."""


@dataclass(frozen=True)
class Plan:
    """The input files, the tasks that read them, and all that decides the output."""

    files: list[InputFile]
    tasks: list[Task]
    options: BuildOptions
    tokenizer: dict[str, str]
    """Hash of each file of the tokenizer."""
    vocab_size: int
    end_of_document: int
    first_validation_file: int | None = None
    """Number of the first file of the validation split; None: documents are chosen by their hash."""
    filters: dict[str, str] = field(default_factory=dict)
    """Hash of the source text of each filter that is not part of Keepstep."""

    @property
    def shape(self) -> ShardShape:
        """The layout of the shards, without their numbers of rows."""
        options, token_bytes = self.options, 2 if self.vocab_size <= 1 << 16 else 4
        return ShardShape(0, options.seq_len, options.block_rows(token_bytes), token_bytes, options.compression)

    @property
    def content(self) -> dict[str, Any]:
        """What decides the output, as JSON values."""
        files = [[file.address, file.size, file.version] for file in self.files]
        optional = {"filters": self.filters, "validation": self.first_validation_file}
        return self._content(files) | {name: value for name, value in optional.items() if value}

    def _content(self, files: Sequence[Sequence[Any]]) -> dict[str, Any]:
        hashed = xxhash.xxh3_128_hexdigest(json.dumps(files).encode())
        return {"options": self.options.as_json(), "tokenizer": self.tokenizer, "files": hashed}

    @property
    def earlier_content(self) -> dict[str, Any]:
        """`content` as earlier versions computed it, without the files' times of change."""
        return self._content([[file.address, file.size] for file in self.files])

    @property
    def hash(self) -> str:
        """Equal for builds of the same output."""
        return plan_hash(self.content)

    def is_earlier_build(self, manifest: Manifest, written_ns: int) -> bool:
        """Whether an earlier version built the data set from the same inputs.

        Such versions recorded no time of change, so the inputs must be local and older than the manifest."""
        if self.filters or self.first_validation_file is not None:
            return False
        times = [int(file.version) if file.version.isdecimal() else written_ns + 1 for file in self.files]
        return manifest.plan == plan_hash(self.earlier_content) and max(times) <= written_ns

    def task_bytes(self, task: Task) -> int:
        """Input bytes of the task, as stored; files of unknown size count as 0."""
        return sum((p.end - p.start) if p.end is not None else self.files[p.file].size or 0 for p in task)

    def files_of(self, task: Task) -> dict[int, InputFile]:
        """The task's input files by number."""
        return {part.file: self.files[part.file] for part in task}


def make_plan(
    inputs: Sequence[str],
    options: BuildOptions,
    tokenizer: dict[str, str],
    vocab_size: int,
    end_of_document: int,
    validation: Sequence[str] = (),
) -> Plan:
    """Lists the inputs and divides them into tasks. DataError if an input matches nothing or cannot be read."""
    files, first_validation = _list_files(inputs, validation)
    check_text_keys(files, options.read)
    task_bytes = options.task_bytes or _default_task_bytes(files)
    tasks = divide_into_tasks(files, task_bytes, lambda file: cut_file(file, options.read, task_bytes))
    filters = {name: source for name in options.filters if (source := filter_source(name)) is not None}
    return Plan(files, tasks, options, tokenizer, vocab_size, end_of_document, first_validation, filters)


def _list_files(inputs: Sequence[str], validation: Sequence[str]) -> tuple[list[InputFile], int | None]:
    """All files, those of the validation split last, and the number of the first of these."""
    files = list_inputs(inputs)
    if not validation:
        return files, None
    chosen = list_inputs(validation)
    names = {identity(file) for file in chosen}
    others = [file for file in files if identity(file) not in names]
    if not others:
        raise DataError("every input is a --validation file as well; name other inputs to train on")
    if len(others) < len(files):
        log.warning("%d inputs are --validation files; they are not trained on", len(files) - len(others))
    return others + chosen, len(others)


def check_text_keys(files: Sequence[InputFile], options: ReadOptions) -> None:
    """DataError if a pattern of `options.text_keys` matches no file."""
    for pattern, key in options.text_keys:
        if not any(matches(pattern, file.address) for file in files):
            raise DataError(
                f"--text-key {pattern}={key}: no input file matches {pattern}; give the file, its folder or a glob as "
                f"in the inputs, for example {files[0].address}"
            )


def _default_task_bytes(files: Sequence[InputFile]) -> int:
    """A size that gives enough tasks for many workers, and not too many files."""
    total = sum(file.size or 0 for file in files)
    return min(max(total // 256, 4 << 20), 256 << 20)


def plan_hash(content: dict[str, Any]) -> str:
    """The hash of a plan's content, which contains `options`.

    Renamed options are hashed under their earlier names, and added ones only if they are set, so that a data set built
    before is still recognised."""
    options = {_EARLIER_NAMES.get(name, name): value for name, value in content["options"].items()}
    options["filters"] = [_EARLIER_NAMES.get(name, name) for name in options["filters"]]
    read = options["read"].items()
    options["read"] = {name: value for name, value in read if value or name not in _LATER_READ_OPTIONS}
    return xxhash.xxh3_128_hexdigest(json.dumps({**content, "options": options}, sort_keys=True).encode())
