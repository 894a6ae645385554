"""A program for ranks: the live model of a run answers the queries that one process answers too."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from parallel.build_engine import build_engine
from tests.parallel.engine_trial import T, V, config_of, runtime_of, trainable
from train.evaluation.answering import LiveModel, LocalModel, TasksStoppedError
from train.evaluation.queries import Answer, Query
from train.model.gpt import GPT

BATCH = 3


def queries() -> list[Query]:
    """Queries of all kinds: short and long, scored in part, as a whole, and for the next token."""
    generator = np.random.default_rng(1)
    texts = [tuple(generator.integers(0, V, length).tolist()) for length in (1, 2, 5, 9, 17, 31, T, T, 12, 3, 8)]
    asked = [Query(text, scored=number % 3 and min(number, len(text) - 1)) for number, text in enumerate(texts)]
    return [*asked, Query((*texts[-5], 7), scored=T)]


def alone() -> list[Answer]:
    """The answers of one process."""
    made = trainable()
    model = made.build()
    assert isinstance(model, GPT)
    engine = build_engine(config_of(engine="single"), runtime_of(config_of(engine="single")), made)
    weights = {name.removeprefix("model."): value for name, value in engine.state().items() if name[:6] == "model."}
    model.load_state_dict(weights, strict=False)
    return LocalModel(model.eval(), V, torch.device("cpu"), torch.float32, BATCH)(queries())


def answer_each(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The answers on rank 0 by case; and whether every rank notices a stop. Collective."""
    results: dict[str, Any] = {}
    for name, settings in cases.items():
        config = config_of(**settings)
        runtime = runtime_of(config)
        engine = build_engine(config, runtime, trainable())
        recipe = SimpleNamespace(model=SimpleNamespace(seq_len=T))
        run: Any = SimpleNamespace(engine=engine, runtime=runtime, recipe=recipe, stop=None, enter=lambda *_: None)
        model = LiveModel(run, 1, V, BATCH)
        if runtime.world.rank == 0:
            results[name] = [
                [one.log_probability, one.most_likely] for one in (*model(queries()), *model(queries()[:1]))
            ]
            model.finish()
        else:
            model.serve()
        run.stop = runtime.world.rank == 1
        try:
            model(queries()) if runtime.world.rank == 0 else model.serve()
        except TasksStoppedError:
            results[f"{name} stopped"] = True
        engine.close()
    return results
