"""Without a process group; on real ranks they are tested in test_engine.py."""

import torch

from parallel.collectives import any_rank, broadcast_from_rank0, gather_objects, sum_over_ranks


def test_one_process_agrees_with_itself() -> None:
    assert any_rank(True)
    assert not any_rank(False)
    assert broadcast_from_rank0({"a": 1}) == {"a": 1}
    assert gather_objects("mine") == ["mine"]


def test_a_sum_is_a_new_tensor() -> None:
    mine = torch.ones(2, requires_grad=True)
    total = sum_over_ranks(mine)
    total.zero_()
    assert mine.tolist() == [1.0, 1.0]
    assert not total.requires_grad
