"""Reads the validation split: the same rows for every number of ranks. T tokens."""

from collections.abc import Iterator, Sequence

import numpy as np

from data_pipeline.shards.rows_reader import RowReader
from data_pipeline.stream.assemble import batches, find_pieces
from data_pipeline.stream.batch import Batch
from data_pipeline.stream.mixture import Samples


def validation_rows(rows_of_source: Sequence[int], sequences: int) -> list[tuple[int, int]]:
    """(source, row) of the first `sequences` rows, taken from the sources in turn. Fewer if there are fewer rows."""
    rows = [(row, source) for source, size in enumerate(rows_of_source) for row in range(min(size, sequences))]
    return [(source, row) for row, source in sorted(rows)[:sequences]]


def validation_batches(
    readers: Sequence[RowReader],
    cuts: Sequence[int],
    *,
    sequences: int,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    end_of_document: int,
) -> Iterator[Batch]:
    """This rank's batches of the first rows of the split. Every rank gets the same number of batches.

    `readers` and `cuts` have one entry for each source. Missing rows at the end are padding without labels."""
    rows = validation_rows([reader.rows * cut for reader, cut in zip(readers, cuts, strict=True)], sequences)
    seq_len = readers[0].shape.row_tokens // cuts[0]
    for start in range(0, len(rows), micro_batch_size * world_size):
        first = start + rank * micro_batch_size
        tokens = np.full((micro_batch_size, seq_len), end_of_document, np.uint32)
        used, zeros = np.zeros(micro_batch_size, np.int64), np.zeros(micro_batch_size, np.int64)
        sources, numbers = np.zeros(micro_batch_size, np.int32), np.full(micro_batch_size, -1, np.int64)
        for i, (source, row) in enumerate(rows[first : first + micro_batch_size]):
            row_tokens, row_used = readers[source].cut_rows(np.array([row]), cuts[source], zeros[:1], zeros[:1])
            tokens[i], used[i] = row_tokens[0], row_used[0]
            sources[i], numbers[i] = source, first + i
        samples = Samples(numbers, sources, zeros, zeros, zeros, zeros)
        yield from batches(find_pieces(tokens, used, end_of_document, samples), micro_batch_size)
