"""Models that answer queries: one in this process, and the live one of a run, whose ranks share the queries.

In a run, rank 0 runs the harness. It sends each list of queries to the other ranks, which do nothing else meanwhile
(`serve`). Every rank computes an equal number of batches, because engines gather weights in each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from parallel.collectives import any_rank, gather_objects
from parallel.engines.precision import working_weights
from train.device_batch import to_device
from train.evaluation.queries import NOTHING, Answer, Query, answering, answers_of, batch_of, by_length
from train.model.gpt import GPT
from train.run import Run

STOP_EVERY = 32
"""Batches between two questions whether a rank was asked to stop. Each is an exchange between hosts."""


class TasksStoppedError(Exception):
    """A rank was asked to stop while tasks were evaluated."""


@dataclass(frozen=True)
class LocalModel:
    """A model on one device, in evaluation mode. It computes in `dtype`."""

    model: GPT
    vocab_size: int
    """Tokens of the tokenizer: the rest of the embedding is padding."""
    device: torch.device
    dtype: torch.dtype
    batch_size: int
    advance: Callable[[float], None] = lambda _: None
    """Gets the number of queries of each batch."""

    @torch.no_grad()
    def __call__(self, queries: Sequence[Query]) -> list[Answer]:
        """The answers, in the order of the queries."""
        loss_fn, order = answering(self.vocab_size), by_length(queries)
        found: dict[int, Answer] = {}
        with working_weights(self.model, self.dtype):
            for start in range(0, len(order), self.batch_size):
                numbers = order[start : start + self.batch_size]
                batch = batch_of([queries[number] for number in numbers], self.model.config.seq_len)
                values = loss_fn(self.model, to_device(batch, self.device)).sums.tolist()
                found |= dict(zip(numbers, answers_of(values), strict=True))
                self.advance(len(numbers))
        return [found[number] for number in range(len(queries))]


class LiveModel:
    """The model of a run, with its present weights. Rank 0 calls it, and the others `serve`. Collective."""

    def __init__(self, run: Run, step: int, vocab_size: int, batch_size: int) -> None:
        self._run, self._step, self._batch_size = run, step, batch_size
        self._loss_fn = answering(vocab_size)

    def __call__(self, queries: Sequence[Query]) -> list[Answer]:
        """The answers, in the order of the queries. TasksStoppedError on all ranks if one was asked to stop."""
        return self._shared(gather_objects(list(queries))[0])

    def serve(self) -> None:
        """Compute this rank's share of all queries of rank 0 until it calls `finish`."""
        while (queries := gather_objects(None)[0]) is not None:
            self._shared(queries)

    def finish(self) -> None:
        """Let the other ranks return from `serve`."""
        gather_objects(None)

    def _shared(self, queries: Sequence[Query]) -> list[Answer]:
        runtime, order = self._run.runtime, by_length(queries)
        own = order[runtime.data_parallel_rank :: runtime.data_parallel_size]
        most = -(-len(order) // runtime.data_parallel_size)
        found: dict[int, Answer] = {}
        for number, start in enumerate(range(0, most, self._batch_size)):
            numbers = own[start : start + self._batch_size]
            answers = self._compute([queries[one] for one in numbers])
            found |= dict(zip(numbers, answers, strict=False))  # the rest of the batch was filled
            if number % STOP_EVERY == 0 and any_rank(bool(self._run.stop)):
                raise TasksStoppedError
        together = {one: answer for share in gather_objects(found) for one, answer in share.items()}
        return [together[one] for one in range(len(queries))]

    def _compute(self, queries: Sequence[Query]) -> list[Answer]:
        run = self._run
        run.enter("evaluate", self._step)
        filled = [*queries, *[NOTHING] * (self._batch_size - len(queries))]
        batch = batch_of(filled, run.recipe.model.seq_len)
        return answers_of(run.engine.evaluate(to_device(batch, run.runtime.device), self._loss_fn).tolist())
