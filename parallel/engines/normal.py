"""Normal values by number: a function of a key and a number, with the same bits on every CPU and device.

Numbers 2p and 2p + 1 are a pair. Each pair is hashed to 64 bits by SplitMix64, a counter-based generator (Steele, Lea
and Flood 2014, "Fast splittable pseudorandom number generators", figure 13), and each of the two gets 32 of them. One
bit is the sign. The others choose a probability below a half, for which a table gives the value: the inverse of the
normal distribution, linear between 64 points of each octave. So no value is drawn before another, and a rank can draw
any part of a tensor.

Only integers are hashed, and only single products and sums of fp32 are rounded, which IEEE 754 defines to the last bit.
Logarithm and cosine, which other methods take, have other last bits with other CPU instructions and on other devices.
"""

import functools
from itertools import pairwise
from statistics import NormalDist

import torch
from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15
"""Distance of the hash's inputs for adjacent pairs: 2^64 divided by the golden ratio."""
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""Shift and factor of each round of the hash."""
POINT_BITS = 6
"""Logarithm of the number of points in each octave of probability."""
OCTAVES = 31
"""Halvings of the probability, from a half down to 2^-32; the largest value is 6.2 standard deviations."""
MANTISSA_BITS, EXPONENT_BIAS = 23, 127


def standard_normal(key: int, pairs: Tensor) -> Tensor:
    """The fp32 values of numbers 2p and 2p + 1 for each pair p, normal with mean 0 and standard deviation 1.

    `pairs` is int64, contiguous, and overwritten. The two values stand side by side, so the last dimension of the
    result is twice as long."""
    bits = _hash(key, pairs).view(torch.int32).view(-1)
    odd = bits.bitwise_and(0x7FFFFFFF).bitwise_or_(1)
    scaled = odd.float()  # 2^32 times the probability, from 1 to 2^31
    segment = torch.bitwise_right_shift(scaled.view(torch.int32), MANTISSA_BITS - POINT_BITS, out=odd)
    segment.sub_(EXPONENT_BIAS << POINT_BITS)
    line = _lines(pairs.device).index_select(0, segment)
    values = line.imag.mul(scaled).add_(line.real)
    values.view(torch.int32).bitwise_xor_(bits.bitwise_and_(-(2**31)))  # the sign
    return values.view(*pairs.shape[:-1], 2 * pairs.shape[-1])


def _hash(key: int, pairs: Tensor) -> Tensor:
    """64 bits for each pair, in place."""
    mixed = pairs.mul_(_signed(GAMMA)).add_(_signed(key))
    shifted = torch.empty_like(mixed)
    for shift, factor in ROUNDS:
        torch.bitwise_right_shift(mixed, shift, out=shifted)
        shifted.bitwise_and_(2 ** (64 - shift) - 1)  # torch shifts copies of the sign in
        mixed.bitwise_xor_(shifted)
        if factor != 1:
            mixed.mul_(_signed(factor))
    return mixed


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return (value + 2**63) % 2**64 - 2**63


@functools.cache
def _lines(device: torch.device) -> Tensor:
    """The line of each segment: value = real + imaginary * (2^32 times the probability). Shape (segments,), complex64.

    One gather of a complex number is faster than two of real ones. The last line repeats, for probabilities that are
    rounded up to a half."""
    per_octave = 1 << POINT_BITS
    points = [2**octave * (1 + part / per_octave) for octave in range(OCTAVES) for part in range(per_octave)]
    points.append(2**OCTAVES)
    values = [-NormalDist().inv_cdf(point / 2**32) for point in points]
    lines: list[tuple[float, float]] = []
    for (low, high), (begin, end) in zip(pairwise(points), pairwise(values), strict=True):
        slope = (end - begin) / (high - low)
        lines.append((begin - slope * low, slope))
    return torch.view_as_complex(torch.tensor([*lines, lines[-1]], dtype=torch.float32, device=device))
