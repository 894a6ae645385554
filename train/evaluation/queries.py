"""What a benchmark asks a language model, as batches that every engine computes.

A query is the beginning of a document. It asks for the probability of its last tokens, or for the most likely next one.
Rows are padded at the end, to a multiple of PAD tokens, so that few shapes are computed (and compiled).

Shapes: B queries, T tokens, V vocabulary of the tokenizer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from data_pipeline.stream.batch import IGNORE, Batch
from parallel.engine import BatchLoss, LossFn
from train.device_batch import DeviceBatch

PAD = 64


@dataclass(frozen=True)
class Query:
    """The tokens of a document's beginning."""

    tokens: tuple[int, ...]
    scored: int = 0
    """How many of the last tokens are scored; 0: the next token is wanted."""


@dataclass(frozen=True)
class Answer:
    """The answer to a query."""

    log_probability: float
    """Of the scored tokens together, given those before them, in nats."""
    most_likely: int
    """The most likely next token; or, if tokens were scored, 1 if each of them was the most likely one."""


Model = Callable[[Sequence[Query]], list[Answer]]
"""Answers queries, in their order."""

NOTHING = Query((0,))
"""A query that fills a batch."""


def by_length(queries: Sequence[Query]) -> list[int]:
    """The numbers of the queries, the longest first, so that batches have little padding."""
    return sorted(range(len(queries)), key=lambda number: -len(queries[number].tokens))


def batch_of(queries: Sequence[Query], seq_len: int) -> Batch:
    """The queries as a micro batch. The label of a token that is not scored is IGNORE."""
    inputs = [query.tokens[:-1] if query.scored else query.tokens for query in queries]
    width = min(seq_len, -(-max(map(len, inputs)) // PAD) * PAD)
    tokens_BT, labels_BT = np.zeros((len(queries), width), np.int64), np.full((len(queries), width), IGNORE)
    for row, (query, known) in enumerate(zip(queries, inputs, strict=True)):
        tokens_BT[row, : len(known)] = known
        if query.scored:
            labels_BT[row, len(known) - query.scored : len(known)] = query.tokens[-query.scored :]
    positions_BT = np.broadcast_to(np.arange(width), tokens_BT.shape).copy()
    rows_B = np.arange(len(queries))
    # The last token of each row is found by its document: padding is a document of its own.
    documents_BT = (positions_BT >= np.array([[len(known)] for known in inputs])).astype(np.int32)
    return Batch(tokens_BT, labels_BT, positions_BT, documents_BT, np.zeros_like(rows_B, np.int32), rows_B)


def answering(vocab_size: int) -> LossFn:
    """A loss function whose sums are two numbers for each query of the batch: those of `Answer`."""

    def loss_fn(model: nn.Module, batch: DeviceBatch) -> BatchLoss:
        batch.await_copy()
        logits_BTV = model(batch.tokens_BT, batch.positions_BT, batch.documents_BT)[..., :vocab_size]
        found_B2 = _answers(logits_BTV, batch.labels_BT, batch.documents_BT)
        return BatchLoss(objective=found_B2.sum(), sums=found_B2.reshape(-1))

    return loss_fn


def _answers(logits_BTV: Tensor, labels_BT: Tensor, documents_BT: Tensor) -> Tensor:
    """The numbers of `Answer` for each row. Shape (B, 2), fp32."""
    wanted_BT = labels_BT != IGNORE
    rows_N, places_N = wanted_BT.nonzero(as_tuple=True)
    chosen_NV = logits_BTV[rows_N, places_N].float()
    labels_N = labels_BT[rows_N, places_N]
    scores_N = torch.log_softmax(chosen_NV, dim=-1).gather(1, labels_N[:, None])[:, 0]
    scores_B = torch.zeros(len(labels_BT), device=scores_N.device).index_add_(0, rows_N, scores_N)
    missed_B = torch.zeros_like(scores_B).index_add_(0, rows_N, (chosen_NV.argmax(dim=-1) != labels_N).float())
    last_B = (documents_BT == 0).sum(dim=1) - 1
    next_B = logits_BTV[torch.arange(len(last_B), device=last_B.device), last_B].float().argmax(dim=-1)
    likely_B = torch.where(wanted_BT.any(dim=1), (missed_B == 0).long(), next_B)
    return torch.stack((scores_B, likely_B.float()), dim=1)  # ids up to 2^24 are exact in fp32


def answers_of(values: Sequence[float]) -> list[Answer]:
    """The answers from the sums of a batch."""
    return [Answer(values[at], int(values[at + 1])) for at in range(0, len(values), 2)]
