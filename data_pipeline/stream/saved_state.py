"""The stream's part of a checkpoint: what it records of the data, and the checks when a run resumes."""

from collections.abc import Sequence
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.shards.dataset import DataSet
from data_pipeline.shards.manifest import TRAIN
from data_pipeline.stream.counters import add, from_json, to_json
from data_pipeline.stream.plan import BatchSizes

STATE_VERSION = 1


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


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state of all ranks together. Tensor-parallel peers have the same rank and data, so they count once."""
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
