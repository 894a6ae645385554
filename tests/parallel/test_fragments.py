"""The properties of the boxes into which a flat range of a row-major tensor is cut."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

from parallel.fragments import FlatFragment, boxes

SHAPES = st.lists(st.integers(1, 6), max_size=5).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@given(ranges())
def test_boxes_cover_each_element_of_the_range_once(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    covered = torch.zeros(shape, dtype=torch.int64)
    numbers = torch.arange(math.prod(shape)).view(shape)
    for offsets, sizes, position in boxes(shape, start, stop):
        box = tuple(slice(o, o + size) for o, size in zip(offsets, sizes, strict=True))
        covered[box] += 1
        count = math.prod(sizes)
        assert numbers[box].flatten().tolist() == list(range(start + position, start + position + count))
    expected = torch.zeros(math.prod(shape), dtype=torch.int64)
    expected[start:stop] = 1
    assert torch.equal(covered.flatten(), expected)


@given(ranges())
def test_the_number_of_boxes_is_bounded(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    assert len(boxes(shape, start, stop)) <= max(1, 2 * len(shape) - 1)


def test_a_tensor_without_elements_has_no_boxes() -> None:
    assert boxes((3, 0, 2), 0, 0) == []
    assert boxes((), 0, 0) == []


@given(ranges())
def test_a_fragment_shows_each_box_as_a_view_of_its_memory(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    flat = torch.arange(start, stop, dtype=torch.float32)
    fragment = FlatFragment(flat, shape, start)
    assert tuple(fragment.shape) == shape
    items = fragment.__create_write_items__("x", fragment)
    assert [item.tensor_data.chunk for item in items if item.tensor_data] == fragment.__create_chunk_list__()
    for item in items:
        fragment.__get_tensor_shard__(item.index).fill_(-1)
    assert flat.eq(-1).all()


def test_only_checkpoints_can_use_a_fragment() -> None:
    fragment = FlatFragment(torch.zeros(4), (2, 3), 1)
    with pytest.raises(
        NotImplementedError, match=r"only checkpoints read and write a FlatFragment; aten.add.* is not supported"
    ):
        fragment.add(1)
    with pytest.raises(ValueError, match=r"no box at .*FlatFragment\(shape=\(2, 3\), start=1, numel=4\)"):
        fragment.__get_tensor_shard__(MetadataIndex("x", torch.Size((5, 5))))
