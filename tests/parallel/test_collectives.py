"""Collectives without a process group. test_engine.py tests them on real ranks."""

import torch

from parallel.collectives import any_rank, gather_objects, sum_over_ranks


def test_one_process_agrees_with_itself() -> None:
    assert any_rank(True)
    assert not any_rank(False)
    assert gather_objects("value") == ["value"]


def test_a_sum_is_a_new_tensor() -> None:
    tensor = torch.ones(2, requires_grad=True)
    total = sum_over_ranks(tensor)
    total.zero_()
    assert tensor.tolist() == [1.0, 1.0]
    assert not total.requires_grad
