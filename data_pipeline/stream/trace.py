"""Which documents a step of a run trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_pipeline.config import DataConfig
from data_pipeline.errors import DataError
from data_pipeline.shards.cache import BlockCache
from data_pipeline.shards.dataset import DataSet
from data_pipeline.shards.manifest import TRAIN
from data_pipeline.shards.rows_reader import RowReader
from data_pipeline.stream.audit import plan_of
from data_pipeline.stream.plan import Plan
from data_pipeline.stream.stream import merge_states
from data_pipeline.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class Document:
    """A document's piece in a row."""

    file: str
    number: int
    """Of the record in the file, from 0."""
    first_token: int
    """Of the document, in this piece."""
    tokens: int
    text: str


@dataclass(frozen=True)
class TracedSample:
    """A row that a step trained on."""

    sample: int
    source: str
    epoch: int
    row: int
    documents: list[Document]


def trace(
    config: DataConfig,
    *,
    seq_len: int,
    global_batch_size: int,
    step: int,
    wanted: Sequence[int] | None = None,
    states: Sequence[dict[str, Any]] = (),
) -> list[TracedSample]:
    """The samples of a step (counted from 0), or the `wanted` ones (places in the global batch)."""
    places = range(global_batch_size) if wanted is None else wanted
    if any(not 0 <= place < global_batch_size for place in places):
        raise DataError(
            f"--sample must be 0 to {global_batch_size - 1}, a place in the global batch, not {list(places)}"
        )
    plan = plan_of(config, seq_len, global_batch_size, states)
    bad = merge_states(states)["quarantined"] if states else []
    readers = []
    for number, source in enumerate(config.sources):
        reader = RowReader(DataSet(source.path, source.mirror), TRAIN, number, BlockCache(1 << 28))
        reader.quarantined.update({block: why for of, block, why in bad if of == number})
        readers.append(reader)
    tokenizer = DataSet(config.sources[0].path, config.sources[0].mirror).tokenizer()
    located = plan.locate(step * global_batch_size + np.array(places, np.int64))
    rows = zip(*(getattr(located, name).tolist() for name in ("sample", "source", "epoch", "row")), strict=True)
    return [
        TracedSample(
            sample, config.sources[source].path, epoch, row, _documents(readers[source], plan, source, row, tokenizer)
        )
        for sample, source, epoch, row in rows
    ]


def _documents(reader: RowReader, plan: Plan, source: int, row: int, tokenizer: Tokenizer) -> list[Document]:
    cuts = plan.cuts[source]
    stored, part = divmod(row, cuts)
    stored = int(reader.without_quarantined(np.array([stored]))[0])
    width = reader.shape.row_tokens // cuts
    zero = np.zeros(1, np.int64)
    tokens, used = (array[0] for array in reader.cut_rows(np.array([stored]), 1, zero, zero))
    block, offset = divmod(stored, reader.shape.block_rows)
    starts, pieces = reader.origins(block)
    of_row = pieces[starts[offset] : starts[offset + 1]]
    bounds = [*of_row["start"].tolist(), int(used)]
    out = []
    for piece, begin, end in zip(of_row, bounds, bounds[1:], strict=False):
        first, last = max(begin, part * width), min(end, (part + 1) * width)
        if first < last:
            ids = [token for token in tokens[first:last].tolist() if token != tokenizer.end_of_document]
            file = reader.files[int(piece["file"])]
            before = int(piece["offset"]) + first - begin
            out.append(Document(file, int(piece["document"]), before, last - first, tokenizer.decode(ids)))
    return out
