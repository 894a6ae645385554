"""Reads back what sinks wrote."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32 * 1024


def tensorboard_curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Returns the points of a curve as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [(point.step, point.value) for point in events.Scalars(tag)]


def wandb_rows(files: list[Path], last_step: int) -> list[dict[str, Any]]:
    """Returns the rows of the history in files of wandb (*.wandb), once the last one is there.

    wandb's service writes them. It is another process, and may still write when the run has finished."""
    limit = time.monotonic() + 600
    while True:
        rows = list(_rows(files))
        if any(row["_step"] == last_step for row in rows):
            return rows
        assert time.monotonic() < limit, f"{rows[-1:]} is the last row"
        time.sleep(0.1)


def _rows(files: list[Path]) -> Iterator[dict[str, Any]]:
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2
    for file in files:
        for data in wandb_records(file.read_bytes()):
            record = messages.Record()
            record.ParseFromString(data)
            if record.HasField("history"):
                items = record.history.item
                yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def wandb_records(content: bytes) -> Iterator[bytes]:
    """Yields the records of a file in LevelDB's log format, which begins with 7 bytes of wandb's own."""
    assert content[:4] == b":W&B"
    at, record = 7, b""
    while at + 7 <= len(content):
        if BLOCK - at % BLOCK < 7:  # the rest of the block is padding
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        if at + 7 + length > len(content):
            return  # it is still being written
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""
