import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.build.packing import Packing, pack

lengths_of_documents = st.lists(st.integers(1, 90), max_size=80)


@pytest.mark.parametrize("packing", ["best-fit", "concatenate"])
@given(lengths=lengths_of_documents, row_tokens=st.integers(1, 40))
def test_every_token_is_packed_once_and_no_row_is_too_long(
    packing: Packing, lengths: list[int], row_tokens: int
) -> None:
    pieces = pack(np.array(lengths, np.int64), row_tokens, packing)
    tokens = [
        (document, offset + i)
        for document, offset, length in zip(pieces.document, pieces.offset, pieces.length, strict=True)
        for i in range(length)
    ]
    assert sorted(tokens) == [(document, i) for document, length in enumerate(lengths) for i in range(length)]
    sizes = [pieces.length[start:end].sum() for start, end in zip(pieces.row_start, pieces.row_start[1:], strict=False)]
    assert all(0 < size <= row_tokens for size in sizes)


@given(lengths=lengths_of_documents, row_tokens=st.integers(1, 40))
def test_best_fit_cuts_only_documents_longer_than_a_row(lengths: list[int], row_tokens: int) -> None:
    pieces = pack(np.array(lengths, np.int64), row_tokens, "best-fit")
    times = np.bincount(pieces.document, minlength=len(lengths))
    assert times.tolist() == [-(-length // row_tokens) for length in lengths]
    unfinished = pieces.offset + pieces.length < np.array(lengths, np.int64)[pieces.document]
    assert (pieces.length[unfinished] == row_tokens).all()  # a piece that does not end its document ends its row


@given(lengths=lengths_of_documents, row_tokens=st.integers(1, 40))
def test_concatenation_leaves_room_only_in_the_last_row(lengths: list[int], row_tokens: int) -> None:
    pieces = pack(np.array(lengths, np.int64), row_tokens, "concatenate")
    assert pieces.rows == -(-sum(lengths) // row_tokens)


def test_best_fit_leaves_less_than_a_thousandth_of_padding() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(6, 1.2, 100_000).astype(np.int64) + 1, 10**6)
    pieces = pack(lengths, 2048, "best-fit")
    assert pieces.rows * 2048 < 1.001 * lengths.sum()


def test_a_document_goes_into_the_row_with_the_least_room() -> None:
    pieces = pack(np.array([6, 7, 3, 4]), 10, "best-fit")
    rows = [sorted(pieces.document[a:b].tolist()) for a, b in zip(pieces.row_start, pieces.row_start[1:], strict=False)]
    assert rows == [[0, 3], [1, 2]]
