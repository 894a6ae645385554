"""The trace: which documents a step of a run trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from data_pipeline.batch_sizes import Changes
from data_pipeline.config import DataConfig
from data_pipeline.errors import DataError
from data_pipeline.shards.cache import BlockCache
from data_pipeline.shards.dataset import DataSet
from data_pipeline.shards.manifest import FILES, TRAIN
from data_pipeline.shards.rows_reader import RowReader
from data_pipeline.stream.audit import plan_of
from data_pipeline.stream.saved_state import check_quarantined, merge_states
from data_pipeline.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class TracedDocument:
    """A piece of a document in a row."""

    file: str
    """Address of the input file."""
    number: int
    """Number of the record in the file, from 0."""
    first_token: int
    """The document's first token in the piece."""
    tokens: int
    """Tokens in the piece."""
    text: str
    """Text of the piece."""


@dataclass(frozen=True)
class TracedSample:
    """A row that a step trained on."""

    sample: int
    """Global sample index."""
    source: str
    """Path of the data set."""
    epoch: int
    row: int
    documents: list[TracedDocument]


def trace(
    config: DataConfig,
    *,
    seq_len: int,
    global_batch_size: int,
    step: int,
    positions: Sequence[int] | None = None,
    states: Sequence[dict[str, Any]] = (),
    batch_changes: Changes = (),
) -> list[TracedSample]:
    """The samples of step number `step`, counted from 0, at these positions in the global batch; None: at all.

    `states` are those of a checkpoint of the run. DataError if a position is out of range or the data changed."""
    plan = plan_of(config, seq_len, global_batch_size, states, batch_changes)
    size = plan.batch_sizes.size(step)
    positions = range(size) if positions is None else positions
    if any(not 0 <= position < size for position in positions):
        raise DataError(f"--sample must be 0 to {size - 1}, a position in the global batch, not {list(positions)}")
    readers = _readers(config, states)
    tokenizer = DataSet(config.sources[0].path, config.sources[0].mirror).tokenizer()
    located = plan.locate(plan.batch_sizes.first_sample(step) + np.array(positions, np.int64))
    rows = zip(*(getattr(located, name).tolist() for name in ("sample", "source", "epoch", "row")), strict=True)
    return [
        TracedSample(
            sample,
            config.sources[source].path,
            epoch,
            row,
            _documents(readers[source], row, plan.cuts[source], tokenizer),
        )
        for sample, source, epoch, row in rows
    ]


def _readers(config: DataConfig, states: Sequence[dict[str, Any]]) -> list[RowReader]:
    """A reader of each source, with the quarantined blocks that the states record."""
    readers = [
        RowReader(DataSet(source.path, source.mirror), TRAIN, number, BlockCache(1 << 28))
        for number, source in enumerate(config.sources)
    ]
    for source, block, reason in merge_states(states)["quarantined"] if states else []:
        check_quarantined((source, block), [reader.blocks for reader in readers])
        readers[source].quarantine.reasons[block] = reason
    return readers


def _documents(reader: RowReader, row: int, cuts: int, tokenizer: Tokenizer) -> list[TracedDocument]:
    """The pieces of documents in a row, if each stored row is cut into `cuts` rows."""
    stored, part = divmod(row, cuts)
    stored = int(reader.quarantine.replace(np.array([stored]))[0])
    width = reader.shape.row_tokens // cuts
    zero = np.zeros(1, np.int64)
    tokens, used = (array[0] for array in reader.cut_rows(np.array([stored]), 1, zero, zero))
    block, offset = divmod(stored, reader.shape.block_rows)
    starts, pieces = reader.origins(block)
    of_row = pieces[starts[offset] : starts[offset + 1]]
    bounds = pairwise([*of_row["start"].tolist(), int(used)])
    out = []
    for piece, (begin, end) in zip(of_row, bounds, strict=True):
        first, last = max(begin, part * width), min(end, (part + 1) * width)
        if first < last:
            ids = [token for token in tokens[first:last].tolist() if token != tokenizer.end_of_document]
            file = _file_of(reader, int(piece["file"]))
            first_token = int(piece["offset"]) + first - begin
            out.append(TracedDocument(file, int(piece["document"]), first_token, last - first, tokenizer.decode(ids)))
    return out


def _file_of(reader: RowReader, number: int) -> str:
    """The address of an input file. DataError if a row names one that the data set does not have."""
    if number >= len(reader.files):
        raise DataError(
            f"a row is of input file {number}, but {FILES} has {len(reader.files)}; build the data set again"
        )
    return reader.files[number]
