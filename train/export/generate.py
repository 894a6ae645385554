"""Continues a prompt token by token, to look at a model. Too slow for serving: each token recomputes the whole context.

Shapes: T sequence, V vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from train.model.gpt import GPT


@torch.inference_mode()
def generate(
    model: GPT,
    prompt: list[int],
    *,
    vocab_size: int,
    end_of_document: int,
    max_tokens: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 1,
) -> Iterator[int]:
    """New token ids below `vocab_size`, until the end of the document or until there are `max_tokens`.

    The prompt is the beginning of a document, as in training. Temperature 0 always takes the most probable token."""
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(max_tokens):
        logits_V = _next_logits(model, tokens)[:vocab_size]
        token = _sample(logits_V, temperature, top_k, generator)
        if token == end_of_document:
            return
        tokens.append(token)
        yield token


def _next_logits(model: GPT, tokens: list[int]) -> Tensor:
    """Logits_V of the token after the context, which is cut to the model's `seq_len`."""
    context_1T = torch.tensor([tokens[-model.config.seq_len :]])
    positions_1T = torch.arange(context_1T.shape[1])[None]
    return model(context_1T, positions_1T, torch.zeros_like(context_1T))[0, -1].float()


def _sample(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    best = logits_V.topk(min(top_k, logits_V.numel()))
    probabilities = (best.values / temperature).softmax(dim=0)
    return int(best.indices[torch.multinomial(probabilities, 1, generator=generator)])
