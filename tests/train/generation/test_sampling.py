"""The rules of sampling are those of transformers."""

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from train.generation.sampling import Sampling, choose, penalized, warped

LOGITS_V = torch.tensor([2.0, -1.0, 0.5, 3.0, 2.5, -4.0, 1.0, 0.0])
TEXT = [0, 1, 3, 3]
ALL = Sampling(temperature=0.7, top_k=5, top_p=0.85, min_p=0.1, repetition_penalty=1.3)


def theirs(sampling: Sampling) -> torch.Tensor:
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k is not None:
        processors.append(TopKLogitsWarper(sampling.top_k))
    processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(MinPLogitsWarper(sampling.min_p))
    ids: Any = torch.tensor([TEXT])
    return processors(ids, LOGITS_V[None].clone())[0]


@pytest.mark.parametrize(
    "sampling",
    [
        ALL,
        Sampling(temperature=1.5, top_k=None),
        Sampling(temperature=1.0, top_k=3),
        Sampling(temperature=1.0, top_k=None, top_p=0.6),
        Sampling(temperature=1.0, top_k=None, top_p=0.0),
        Sampling(temperature=1.0, top_k=None, min_p=0.3),
        Sampling(temperature=1.0, top_k=None, repetition_penalty=2.0),
        Sampling(temperature=2.0, top_k=100, min_p=1.0),
    ],
    ids=str,
)
def test_the_logits_are_warped_as_by_transformers(sampling: Sampling) -> None:
    ours = warped(penalized(LOGITS_V, TEXT, sampling.repetition_penalty), sampling)
    expected = theirs(sampling)
    assert torch.equal(ours.isinf(), expected.isinf())
    torch.testing.assert_close(ours, expected)


def test_equal_logits_at_the_border_of_top_k_are_all_kept() -> None:
    ties = torch.tensor([1.0, 1.0, 1.0, 0.0])
    ids: Any = torch.tensor([[0]])
    expected = TopKLogitsWarper(2)(ids, ties[None])[0]
    assert torch.equal(warped(ties, Sampling(temperature=1.0, top_k=2)), expected)


def test_temperature_zero_takes_the_most_likely_token_after_the_penalty() -> None:
    generator = torch.Generator()
    assert choose(LOGITS_V, [], Sampling(temperature=0.0), generator) == 3
    assert choose(LOGITS_V, TEXT, Sampling(temperature=0.0, repetition_penalty=1.3), generator) == 4


def test_the_share_of_each_token_follows_its_probability() -> None:
    generator = torch.Generator().manual_seed(3)
    sampling = Sampling(temperature=1.0, top_k=2)
    drawn = [choose(LOGITS_V, [], sampling, generator) for _ in range(2000)]
    expected = LOGITS_V[[3, 4]].softmax(dim=0)[0].item()
    assert set(drawn) == {3, 4}
    assert abs(drawn.count(3) / 2000 - expected) < 0.05
