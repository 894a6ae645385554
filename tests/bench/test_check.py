"""The check for slower steps distinguishes noise from a regression."""

from bench.check import regressions


def test_a_ratio_within_the_noise_passes_and_a_lower_one_is_reported() -> None:
    recorded = {"nanogpt": 1.4, "matmuls": 0.6}
    assert regressions(recorded, {"nanogpt": 1.2, "matmuls": 0.7}, noise=0.15) == []
    (sentence,) = regressions(recorded, {"nanogpt": 1.18, "matmuls": 0.6}, noise=0.15)
    assert sentence == "against nanogpt: 1.18, recorded 1.40, allowed 1.19"
