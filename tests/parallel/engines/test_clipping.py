import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel.engines.clipping import clip_factor, global_norm

CPU = torch.device("cpu")


def test_the_norm_is_over_all_elements() -> None:
    gradients = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    assert global_norm(gradients, CPU)[0] == pytest.approx(5.0)


def test_no_gradients_have_norm_zero() -> None:
    assert global_norm([], CPU) == (0.0, [])


def test_values_keep_their_64_bits_beside_the_norm_of_32() -> None:
    values = [2.0**53 - 1, 0.1, -3.0]
    norm, totals = global_norm([torch.ones(3)], CPU, torch.tensor(values, dtype=torch.float64))
    assert norm == torch.tensor(3.0).sqrt().item()
    assert totals == values


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_non_finite_element_makes_the_norm_non_finite(bad: float) -> None:
    assert not math.isfinite(global_norm([torch.ones(3), torch.tensor([bad])], CPU)[0])


def test_the_factor_has_a_known_value() -> None:
    assert clip_factor(1.26159, 0.1) == pytest.approx(0.07926, abs=1e-5)


@given(norm=st.floats(0, 1e30), bound=st.floats(1e-6, 1e6))
def test_clipped_gradients_stay_within_the_bound_and_small_ones_unchanged(norm: float, bound: float) -> None:
    factor = clip_factor(norm, bound)
    assert norm * factor <= bound * (1 + 1e-9)
    if norm + 1e-6 <= bound:
        assert factor == 1.0
