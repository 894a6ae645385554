"""Answers do not depend on the batch, on padding, on the engine or on the number of ranks."""

from typing import Any

import pytest
import torch

from tests.parallel.engine_trial import T, V, trainable
from tests.parallel.ranks import run_ranks
from tests.train.evaluation.answering_ranks import alone, queries
from train.evaluation.answering import LocalModel
from train.evaluation.queries import Query

CASES = {"ddp": {"engine": "ddp"}, "fsdp2": {"engine": "fsdp2"}, "zero3": {"engine": "zero3"}}


def model_and_logits(tokens: list[int]) -> tuple[LocalModel, torch.Tensor]:
    torch.manual_seed(3)
    model: Any = trainable().build().eval()
    ids = torch.tensor([tokens])
    logits = model(ids, torch.arange(len(tokens))[None], torch.zeros_like(ids))[0].detach()
    return LocalModel(model, V, torch.device("cpu"), torch.float32, batch_size=2), logits


def test_answers_are_those_of_the_logits_of_each_text_alone() -> None:
    tokens = [5, 17, 9, 80, 3, 44, 21]
    model, logits = model_and_logits(tokens[:-1])
    scores = torch.log_softmax(logits, dim=-1)
    likely = [*tokens[:4], int(logits[3].argmax())]
    asked = [
        Query(tuple(tokens), scored=3),
        Query(tuple(tokens[:6])),
        Query(tuple(likely), scored=1),
        Query((1, 2, 3, 4, 5, 6, 7, 8, 9), scored=2),
    ]
    three, following, one, _ = model(asked)
    assert three.log_probability == pytest.approx(sum(scores[n, tokens[n + 1]].item() for n in (3, 4, 5)), rel=1e-6)
    assert following.most_likely == int(logits[5].argmax())
    assert (one.log_probability, one.most_likely) == (pytest.approx(scores[3].max().item(), abs=1e-5), 1)
    assert three.most_likely == int(all(int(logits[n].argmax()) == tokens[n + 1] for n in (3, 4, 5)))


def test_tokens_beyond_the_tokenizer_are_never_answered() -> None:
    model, logits = model_and_logits([1, 2, 3])
    fewer = LocalModel(model.model, 10, model.device, model.dtype, 1)
    assert fewer([Query((1, 2, 3))])[0].most_likely == int(logits[2, :10].argmax())
    expected = torch.log_softmax(logits[1, :10], dim=-1)[3].item()
    assert fewer([Query((1, 2, 3), scored=1)])[0].log_probability == pytest.approx(expected, abs=1e-5)


def test_data_parallel_ranks_share_the_queries_and_give_the_answers_of_one_process() -> None:
    expected = [[one.log_probability, one.most_likely] for one in alone()]
    assert len(expected) == len(queries())
    assert max(len(query.tokens) for query in queries()) == T + 1
    ranks = run_ranks("tests/train/evaluation/answering_ranks.py", "answer_each", 2, CASES)
    for name in CASES:
        assert ranks[0][name] == [
            [pytest.approx(score, abs=1e-4), likely] for score, likely in [*expected, expected[0]]
        ]
        assert all(rank[f"{name} stopped"] for rank in ranks)
