import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.stream.assemble import batches, find_pieces
from data_pipeline.stream.batch import IGNORE, Batch
from data_pipeline.stream.mixture import Samples

END = 9


def samples(rows: int) -> Samples:
    numbers = np.arange(rows, dtype=np.int64)
    return Samples(numbers, np.zeros(rows, np.int32), numbers, numbers, numbers, numbers)


def assemble(tokens: list[list[int]], used: list[int], micro_batch_size: int) -> list[Batch]:
    stored = find_pieces(np.array(tokens, np.uint16), np.array(used, np.int64), END, samples(len(tokens)))
    return batches(stored, micro_batch_size)


def test_labels_do_not_cross_documents() -> None:
    (batch,) = assemble([[1, 2, END, 3, 4, 5]], [6], 1)
    assert batch.labels_BT.tolist() == [[2, END, IGNORE, 4, 5, IGNORE]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert batch.documents_BT.tolist() == [[0, 0, 0, 1, 1, 1]]


def test_padding_is_a_document_without_labels() -> None:
    (batch,) = assemble([[1, 2, END, END, END, END], [1, 2, 3, END, END, END], [END] * 6], [3, 4, 0], 3)
    assert batch.labels_BT.tolist() == [[2, END] + [IGNORE] * 4, [2, 3, END] + [IGNORE] * 3, [IGNORE] * 6]
    assert batch.documents_BT.tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1], [0] * 6]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]]


rows = st.lists(
    st.tuples(st.lists(st.integers(7, 9), min_size=5, max_size=5), st.integers(0, 5)), min_size=4, max_size=4
)


@given(rows=rows, micro_batch_size=st.sampled_from([1, 2, 4]))
def test_every_row_equals_a_token_by_token_walk(rows: list[tuple[list[int], int]], micro_batch_size: int) -> None:
    tokens = [row for row, _ in rows]
    got = assemble(tokens, [used for _, used in rows], micro_batch_size)
    assert len(got) == 4 // micro_batch_size
    for number, (row, used) in enumerate(rows):
        batch, b = got[number // micro_batch_size], number % micro_batch_size
        document = position = 0
        for column, token in enumerate(row):
            starts = column > 0 and (column == used or (column < used and row[column - 1] == END))
            document, position = (document + 1, 0) if starts else (document, position + (column > 0))
            last = column + 1 >= used or token == END
            assert batch.tokens_BT[b, column] == token
            assert batch.documents_BT[b, column] == document
            assert batch.positions_BT[b, column] == position
            assert batch.labels_BT[b, column] == (IGNORE if last else row[column + 1])
        assert batch.samples_B[b] == number


def test_the_arrays_have_the_types_of_the_interface() -> None:
    (batch,) = assemble([[1, 2, END]], [3], 1)
    types = {name: getattr(batch, name).dtype for name in vars(batch)}
    assert types == {
        "tokens_BT": np.int64,
        "labels_BT": np.int64,
        "positions_BT": np.int64,
        "documents_BT": np.int32,
        "sources_B": np.int32,
        "samples_B": np.int64,
    }
