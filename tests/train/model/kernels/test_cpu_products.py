"""The chunks of the CPU kernel cover every visible key once, and no more work than needed."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.model.test_attention import CASES, documents, projections
from train.model.attention import dense_mask
from train.model.kernels.cpu_products import CHUNK, _attention, cut, document_starts


@given(st.lists(st.integers(0, 3), min_size=1, max_size=3 * CHUNK), st.integers(1, 3))
@settings(deadline=None, max_examples=50)
def test_chunks_show_what_the_dense_mask_shows(steps: list[int], rows: int) -> None:
    one_T = torch.tensor(steps)
    documents_BT = torch.stack([one_T.eq(0).cumsum(0), *[torch.zeros_like(one_T)] * (rows - 1)])
    seen_BTT = torch.zeros(rows, len(steps), len(steps))
    for chunk in cut(document_starts(documents_BT), heads=1):
        queries = (chunk.rows, slice(chunk.start, chunk.end))
        seen_BTT[*queries, chunk.first_key : chunk.end] += 1
        seen_BTT[*queries, chunk.end - chunk.hiding.shape[1] : chunk.end] += chunk.hiding
    assert torch.equal(seen_BTT.clamp(min=0), dense_mask(documents_BT)[:, 0].float())


def test_no_work_is_done_for_keys_of_earlier_documents() -> None:
    (first, second) = cut(document_starts(documents(2 * CHUNK, (CHUNK,))), heads=1)
    assert (first.first_key, second.first_key) == (0, CHUNK)


def test_rows_that_see_the_same_keys_are_multiplied_together() -> None:
    two_equal_rows_and_another = document_starts(documents(2 * CHUNK, (), (), (CHUNK,)))
    shapes = [(c.rows.start, c.rows.stop, c.start) for c in cut(two_equal_rows_and_another, heads=4)]
    assert shapes == [(0, 3, 0), (0, 2, CHUNK), (2, 3, CHUNK)]
    assert len(list(cut(two_equal_rows_and_another, heads=10**6))) == 6  # too many heads for the cache: row by row


def test_compilers_see_one_operation_with_the_same_result() -> None:
    documents_BT = CASES["shorter than a chunk"]
    q, k, v = (tensor.detach() for tensor in projections(2, 5, 4, 2))
    torch.library.opcheck(_attention, (q, k, v, document_starts(documents_BT)))
