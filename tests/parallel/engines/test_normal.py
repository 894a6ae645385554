"""The values are normal, and their bits depend on the key and the number alone."""

import os
import subprocess
import sys
from pathlib import Path
from statistics import NormalDist

import pytest
import torch
import xxhash
from torch import Tensor

from parallel.engines import normal
from parallel.engines.normal import standard_normal

ROOT = Path(__file__).parents[3]
COUNT = 1 << 21
DIGEST = "2de85bb95966e3f0"
"""Hash of 200,002 values, as every CPU computes them."""
PROGRAM = """
import torch, xxhash
from parallel.engines.normal import standard_normal
print(xxhash.xxh3_64_hexdigest(standard_normal(3, torch.arange(2**40, 2**40 + 100_001)).numpy()))
"""


def draw(key: int, first: int = 0, pairs: int = COUNT // 2) -> Tensor:
    return standard_normal(key, torch.arange(first, first + pairs))


@pytest.fixture(scope="module")
def values() -> Tensor:
    return draw(7).double()


def test_moments_are_those_of_the_normal_distribution(values: Tensor) -> None:
    noise = COUNT**-0.5
    assert values.mean().item() == pytest.approx(0.0, abs=4 * noise)
    assert values.std().item() == pytest.approx(1.0, abs=4 * noise)
    assert (values**3).mean().item() == pytest.approx(0.0, abs=4 * 15**0.5 * noise)
    assert (values**4).mean().item() == pytest.approx(3.0, abs=4 * 96**0.5 * noise)


def test_the_distribution_function_is_the_normal_one(values: Tensor) -> None:
    """Kolmogorov and Smirnov's test: a value above 1.95 has a probability of 0.1 %."""
    expected = torch.special.ndtr(values.sort().values)
    found = torch.arange(1, COUNT + 1, dtype=torch.float64) / COUNT
    assert ((found - expected).abs().max() * COUNT**0.5).item() < 1.95


@pytest.mark.parametrize("beyond", [3.0, 4.0])
def test_tails_are_as_heavy_as_the_normal_ones(values: Tensor, beyond: float) -> None:
    expected = COUNT * 2 * NormalDist().cdf(-beyond)
    assert (values.abs() > beyond).sum().item() == pytest.approx(expected, abs=4 * expected**0.5)


@pytest.mark.parametrize("lag", [1, 2, 64, 4096])
def test_neighbours_are_independent(values: Tensor, lag: int) -> None:
    pairs = torch.stack((values[:-lag], values[lag:]))
    assert torch.corrcoef(pairs)[0, 1].item() == pytest.approx(0.0, abs=4 * COUNT**-0.5)
    assert torch.corrcoef(pairs.square())[0, 1].item() == pytest.approx(0.0, abs=4 * COUNT**-0.5)


def test_numbers_beyond_32_bits_have_values_of_their_own() -> None:
    assert not torch.equal(draw(7, 1 << 32, 100), draw(7, 0, 100))
    assert not torch.equal(draw(8, 0, 100), draw(7, 0, 100))


def test_the_largest_probability_and_the_smallest_are_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extreme hashes, through the function that maps hashes to values."""
    hashes = torch.tensor([0, 1, -(2**31), 2**31 - 1, -1, 2**30], dtype=torch.int32).view(torch.int64)
    monkeypatch.setattr(normal, "_hash", lambda key, pairs: hashes.clone())
    found = standard_normal(0, torch.zeros(3, dtype=torch.int64)).tolist()
    exact = -NormalDist().inv_cdf(2**-32)
    assert found == pytest.approx([exact, exact, -exact, 0.0, 0.0, -NormalDist().inv_cdf(0.25)], abs=1e-4)


def test_values_have_the_same_bits_whatever_is_drawn_with_them() -> None:
    whole = draw(3, 0, 50_000)
    assert torch.equal(torch.cat([draw(3, first, 3_500) for first in range(0, 49_000, 3_500)]), whole[:98_000])
    assert torch.equal(standard_normal(3, torch.tensor([[40_000, 5]])), whole[torch.tensor([[80_000, 80_001, 10, 11]])])


def test_values_have_the_same_bits_without_vector_instructions_of_the_cpu() -> None:
    """`default` makes torch take the kernels that every CPU can run."""
    env = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == DIGEST


def test_the_recorded_bits_are_those_of_this_process() -> None:
    assert xxhash.xxh3_64_hexdigest(draw(3, 1 << 40, 100_001).numpy().tobytes()) == DIGEST
