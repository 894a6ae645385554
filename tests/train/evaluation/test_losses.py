"""What follows from summed losses: means, perplexity and bits per byte, of all sources and of each."""

import math

import pytest

from train.evaluation.losses import Losses

TWO = Losses((6.0, 4.0), (2, 3), (8, 12))


def test_the_mean_is_over_targets_and_bits_per_byte_over_bytes() -> None:
    found = TWO.metrics(["a", "b"])
    assert found["validation_loss"] == pytest.approx(2.0)
    assert found["validation_perplexity"] == pytest.approx(math.exp(2.0))
    assert found["validation_bits_per_byte"] == pytest.approx(10.0 / math.log(2) / 20)
    assert found["validation_loss/a"] == pytest.approx(3.0)
    assert found["validation_bits_per_byte/b"] == pytest.approx(4.0 / math.log(2) / 12)


def test_one_source_has_no_values_of_its_own_and_unknown_bytes_give_no_bits() -> None:
    assert Losses((6.0,), (2,)).metrics(["a"], "average_").keys() == {
        "average_validation_loss",
        "average_validation_perplexity",
    }


def test_a_source_without_targets_is_left_out() -> None:
    assert Losses((6.0, 0.0), (2, 0), (8, 0)).by_source(["a", "b"]).keys() == {"a"}
