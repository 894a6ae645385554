"""Chooses the next token from the logits: penalty, temperature, top-k, top-p, min-p, in this order.

The rules and their order are those of transformers' `generate`. V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_TEMPERATURE = 1e-4
"""Below this the most likely token is taken: quotients of logits would overflow."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.8
    """Divides the logits; 0 always takes the most likely token, and then only the penalty counts of the rules."""
    top_k: int | None = 50
    """Keeps the K most likely tokens; None keeps all."""
    top_p: float = 1.0
    """Keeps the fewest most likely tokens whose probabilities sum to at least this."""
    min_p: float = 0.0
    """Keeps the tokens that have at least this share of the probability of the most likely one."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that the text has already, and multiplies the negative ones."""

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < MIN_TEMPERATURE


def choose(logits_V: Tensor, text: Sequence[int], sampling: Sampling, generator: torch.Generator) -> int:
    """The next token after the tokens `text`, given its fp32 logits on the CPU."""
    logits_V = penalized(logits_V, text, sampling.repetition_penalty)
    if sampling.is_greedy:
        return int(logits_V.argmax())
    probabilities_V = warped(logits_V, sampling).softmax(dim=0)
    return int(torch.multinomial(probabilities_V, 1, generator=generator))


def penalized(logits_V: Tensor, text: Sequence[int], penalty: float) -> Tensor:
    """The logits with those of the text's tokens made less likely (CTRL, Keskar et al. 2019, section 4.1)."""
    if penalty == 1.0 or not text:
        return logits_V
    seen = torch.tensor(sorted({token for token in text if token < len(logits_V)}))
    found = logits_V[seen]
    return logits_V.index_put((seen,), torch.where(found < 0, found * penalty, found / penalty))


def warped(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """The logits by temperature, with minus infinity for tokens that top-k, top-p or min-p leaves out."""
    logits_V = logits_V / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(logits_V):
        logits_V = _without(logits_V, logits_V < logits_V.topk(sampling.top_k).values[-1])
    if sampling.top_p < 1.0:  # Holtzman et al. 2020, section 3.1
        ascending = logits_V.sort()
        is_tail_V = ascending.values.softmax(dim=0).cumsum(dim=0) <= 1.0 - sampling.top_p
        is_tail_V[-1] = False
        logits_V = _without(logits_V, torch.empty_like(is_tail_V).scatter_(0, ascending.indices, is_tail_V))
    if sampling.min_p > 0.0:  # Nguyen et al. 2024, section 3
        probabilities_V = logits_V.softmax(dim=0)
        logits_V = _without(logits_V, probabilities_V < sampling.min_p * probabilities_V.max())
    return logits_V


def _without(logits_V: Tensor, is_out_V: Tensor) -> Tensor:
    return logits_V.masked_fill(is_out_V, -torch.inf)
