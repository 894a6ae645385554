"""The runs of torch's kernel on CPU cover every visible key once, in few calls."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.model.test_attention import CASES, documents, projections
from train.model.attention import dense_mask
from train.model.kernels import cpu_sdpa
from train.model.kernels.cpu_products import document_starts
from train.model.kernels.cpu_sdpa import SHORT, Run, _attention, runs, sdpa_attention


def runs_of(documents_BT: torch.Tensor) -> list[Run]:
    return list(runs(document_starts(documents_BT).long()))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=3 * SHORT), st.integers(1, 3))
@settings(deadline=None, max_examples=50)
def test_runs_show_what_the_dense_mask_shows(steps: list[int], rows: int) -> None:
    one_T = torch.tensor(steps)
    documents_BT = torch.stack([one_T.eq(0).cumsum(0), *[torch.zeros_like(one_T)] * (rows - 1)])
    seen_BTT = torch.zeros(rows, len(steps), len(steps))
    for run in runs_of(documents_BT):
        length = run.end - run.start
        shown = torch.ones(length, length).tril() if run.hiding is None else (run.hiding == 0).float()
        seen_BTT[run.rows, run.start : run.end, run.start : run.end] += shown
    assert torch.equal(seen_BTT, dense_mask(documents_BT)[:, 0].float())


def test_short_documents_share_a_call_and_long_ones_have_their_own() -> None:
    spans = [(run.start, run.end, run.hiding is None) for run in runs_of(documents(600, (10, 20, 300, 310, 500)))]
    assert spans == [(0, 20, False), (20, 300, True), (300, 310, True), (310, 500, True), (500, 600, True)]
    many = runs_of(documents(4 * SHORT, tuple(range(4, 4 * SHORT, 4))))
    assert [(run.start, run.end) for run in many] == [(n * SHORT, (n + 1) * SHORT) for n in range(4)]


def test_rows_with_the_same_documents_share_their_calls() -> None:
    assert [(run.rows.start, run.rows.stop) for run in runs_of(documents(300, (), (), (128,), ()))] == [
        (0, 2),
        (2, 3),
        (2, 3),
        (3, 4),
    ]


def test_a_precision_without_products_is_multiplied_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    documents_BT = CASES["one document a row"]
    q, k, v = projections(2, 300, 4, 2, torch.bfloat16)
    seen: list[torch.dtype] = []
    kernel = cpu_sdpa._kernel

    def recorded(query: torch.Tensor, *rest: Any, **options: Any) -> Any:
        seen.append(query.dtype)
        return kernel(query, *rest, **options)

    monkeypatch.setattr(cpu_sdpa, "_kernel", recorded)
    for has_products, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(cpu_sdpa, "is_slow", lambda _, has=has_products: not has)
        out = sdpa_attention(q, k, v, document_starts(documents_BT).long())
        assert seen.pop() == dtype
        assert out.dtype == torch.bfloat16
        assert torch.autograd.grad(out.sum(), q)[0].dtype == torch.bfloat16


def test_compilers_see_one_operation_with_the_same_result() -> None:
    q, k, v = (tensor.detach() for tensor in projections(2, 5, 4, 2))
    torch.library.opcheck(_attention, (q, k, v, document_starts(CASES["shorter than a chunk"]).long()))
