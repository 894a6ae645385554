"""Live bytes are those that tensors hold at the same time, views and freed ones counted as they should be."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from parallel.analysis.live_bytes import LiveBytes


def test_the_peak_counts_what_is_alive_at_the_same_time_and_views_once() -> None:
    weight = torch.zeros(10, 10)
    with LiveBytes([weight]) as live:
        first = weight + 1
        view = first[:5].view(-1)
        second = first + 1
        del first, view
        third = second + 1
        del second
    assert live.start == 400
    assert live.peak == 1200
    assert live.now == 400 + third.nbytes


def test_fake_tensors_count_like_real_ones() -> None:
    with FakeTensorMode():
        large = torch.empty(1 << 20, 1 << 20)
        with LiveBytes() as live:
            large.add_(1)
            large.add(1)
    assert live.peak == 2 * (4 << 40)


def test_a_storage_that_is_emptied_and_filled_again_counts_with_its_size() -> None:
    tensor = torch.zeros(100)
    with LiveBytes([tensor]) as live:
        tensor.untyped_storage().resize_(0)
        assert live.now == 0
        tensor.untyped_storage().resize_(400)
        assert live.now == 400
    tensor.untyped_storage().resize_(0)
    assert live.now == 400  # no longer counted
