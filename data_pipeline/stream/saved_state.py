"""The stream's part of a checkpoint: what it records of the data, and the checks when a run resumes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from data_pipeline.batch_sizes import BatchSizes
from data_pipeline.config import check_one_line
from data_pipeline.errors import DataError
from data_pipeline.shards.dataset import DataSet
from data_pipeline.shards.manifest import TRAIN, Count
from data_pipeline.stream.counters import add, from_json, to_json
from data_pipeline.untrusted import in_one_line

STATE_VERSION = 1
_STRICT = ConfigDict(strict=True, extra="ignore")
_BatchSize = Annotated[int, Field(gt=0, lt=1 << 40)]
_Shown = Annotated[str, AfterValidator(check_one_line)]  # errors repeat it
_Weights = list[Annotated[float, Field(ge=0, allow_inf_nan=False)]]


@dataclass(frozen=True)
class _Source:
    """What a state must say of a source, see `describe`."""

    __pydantic_config__ = _STRICT

    path: _Shown
    fingerprint: _Shown
    rows: Count
    row_tokens: Count
    tokens: Count
    documents: Count
    tokenizer: dict[_Shown, _Shown]


@dataclass(frozen=True)
class _State:
    """What the state of a rank must have, see `Stream.state`."""

    __pydantic_config__ = _STRICT

    rank: Count
    step: Count
    samples: Count
    global_batch_size: _BatchSize
    seq_len: Count
    seed: int
    sources: list[_Source]
    weights: Annotated[list[tuple[Count, _Weights]], Field(min_length=1)]
    quarantined: list[tuple[Count, Count, _Shown]]
    counters: list[tuple[Count, Count, int, int]]
    batch_sizes: Annotated[list[tuple[Count, _BatchSize]], Field(min_length=1)] | None = None


_STATES = TypeAdapter(list[_State])


def describe(dataset: DataSet) -> dict[str, Any]:
    """What a checkpoint records of a source, so that a later error can name what changed."""
    manifest = dataset.manifest
    split = manifest.splits[TRAIN]
    return {
        "path": dataset.address,
        "fingerprint": manifest.fingerprint,
        "rows": split.rows,
        "row_tokens": manifest.row_tokens,
        "tokens": split.tokens,
        "documents": split.documents,
        "tokenizer": manifest.tokenizer,
    }


def check_states(states: Sequence[dict[str, Any]]) -> None:
    """DataError unless these are the states of a stream, whoever wrote them."""
    try:
        parsed = _STATES.validate_json(json.dumps(list(states)))
    except (ValidationError, ValueError) as error:
        first = error.errors(include_url=False)[0] if isinstance(error, ValidationError) else {"loc": (), "msg": error}
        raise _no_state(in_one_line(f"{'.'.join(map(str, first['loc']))[:200]}: {first['msg']}")) from None
    for state in parsed:
        phases = [first for first, _ in state.weights]
        sizes = [first for first, _ in state.batch_sizes or [(0, 1)]]
        if any(firsts[0] != 0 or any(a >= b for a, b in pairwise(firsts)) for firsts in (phases, sizes)):
            raise _no_state("weights or batch_sizes do not begin at 0, or are not in order")
        if any(not 0 < len(weights) <= len(state.sources) or not sum(weights) for _, weights in state.weights):
            raise _no_state("weights are not those of the sources")


def _no_state(problem: str) -> DataError:
    return DataError(f"the checkpoint has no valid state of the data ({problem}); use a checkpoint that Keepstep saved")


def check_quarantined(entry: Sequence[Any], blocks: Sequence[int]) -> None:
    """DataError if a quarantined block of a state is not one of the `blocks` that its source has."""
    if entry[0] >= len(blocks) or entry[1] >= blocks[entry[0]]:
        raise _no_state(f"quarantined block {entry[1]} of source {entry[0]}")


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state of all ranks together. Tensor-parallel peers have the same rank and data, so they count once.

    DataError if they are not states of a stream."""
    check_states(states)
    by_rank = {state["rank"]: state for state in states}
    counters = add(*(from_json(state["counters"]) for state in by_rank.values()))
    quarantined = sorted({tuple(entry[:2]): entry for state in states for entry in state["quarantined"]}.values())
    return {**states[0], "counters": to_json(counters), "quarantined": quarantined}


def check_unchanged(saved: dict[str, Any], seed: int, seq_len: int, sources: Sequence[dict[str, Any]]) -> None:
    """DataError that names what changed since the state was saved, if that changes the order of samples."""
    for name, before, now in (
        ("data.seed", saved["seed"], seed),
        ("model.seq_len", saved["seq_len"], seq_len),
    ):
        if before != now:
            raise DataError(
                f"the checkpoint was saved with {name} {before}, but now it is {now}: the order of samples would "
                f"change; set it back, or start a new run"
            )
    if len(sources) < len(saved["sources"]):
        raise DataError(
            f"the checkpoint was saved with {len(saved['sources'])} data.sources, but now there are {len(sources)}: "
            "keep each source in its place, and set its weight to 0 to stop reading it"
        )
    for number, (before, now) in enumerate(zip(saved["sources"], sources, strict=False)):
        if before["fingerprint"] != now["fingerprint"]:
            keys = [
                key for key in ("rows", "row_tokens", "tokens", "documents", "tokenizer") if before[key] != now[key]
            ]
            changes = "; ".join(f"{key} {before[key]} -> {now[key]}" for key in keys) or "the tokens themselves"
            raise DataError(
                f"data.sources[{number}] {now['path']} is not the data set that the checkpoint was trained on "
                f"({before['path']}, fingerprint {before['fingerprint']} -> {now['fingerprint']}): {changes}; "
                f"give the original data set (new ones may follow the old ones), or start a new run"
            )


def check_first_sample(saved: dict[str, Any], first_step: int, sizes: BatchSizes) -> None:
    """DataError if the resumed run would not begin at the sample at which the state was saved."""
    begins = sizes.first_sample(first_step)
    if saved["samples"] != begins:
        raise DataError(
            f"the checkpoint is at sample {saved['samples']} ({saved['step']} steps of "
            f"{saved['global_batch_size']}), but step {first_step} of train.global_batch_size "
            f"{sizes.size(first_step)} begins at sample {begins}; resume at the step that was saved"
        )
