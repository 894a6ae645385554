from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.config import DataConfig
from data_pipeline.errors import DataError
from data_pipeline.stream.audit import audit, plan_of
from data_pipeline.stream.mixture import Samples
from data_pipeline.stream.plan import Plan
from data_pipeline.stream.stream import open_stream
from tests.data_pipeline.conftest import Built
from tests.data_pipeline.sets import Recorder, build, config, documents

G = 24


@pytest.fixture(scope="module")
def mixed(built: Built, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    other = tmp_path_factory.mktemp("audit") / "other"
    build(other, documents(30, 2), tokenizer)
    return config(built.path, other, weights=[3, 1], weight_changes=[{"step": 20, "weights": [1, 1]}])


def states_after(chosen: DataConfig, steps: int, ranks: int) -> list[dict[str, Any]]:
    states = []
    for rank in range(ranks):
        with open_stream(chosen, seq_len=32) as stream:
            plan = stream.steps(first_step=0, global_batch_size=G, micro_batch_size=2, rank=rank, world_size=ranks)
            list(islice(plan, steps))
            states.append(stream.state(steps))
    return states


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_that_used_what_was_planned_passes(mixed: DataConfig, ranks: int) -> None:
    states = states_after(mixed, 50, ranks)
    result = audit(plan_of(mixed, 32, G, states), 50 * G, (1, 2, 3, 4, 8), states)
    assert result.counters_compared
    assert {epoch.source for epoch in result.epochs} == {0, 1}
    small = [epoch for epoch in result.epochs if epoch.source == 1]
    assert all(epoch.complete for epoch in small[:-1])
    assert sum(epoch.seen for epoch in result.epochs) == 50 * G


def test_wrong_counters_are_detected(mixed: DataConfig) -> None:
    states = states_after(mixed, 30, 1)
    states[0]["counters"][0][3] ^= 1
    plan = plan_of(mixed, 32, G, states)
    with pytest.raises(DataError, match=r"the run's counters differ from its plan: source 0, epoch 0: planned"):
        audit(plan, 30 * G, (1,), states)


def test_weights_that_a_run_did_not_have_are_detected(mixed: DataConfig) -> None:
    states = states_after(mixed, 30, 1)
    states[0]["weights"] = states[0]["weights"][:1]
    unplanned = mixed.model_copy(update={"weight_changes": ()})
    plan = plan_of(unplanned, 32, G, states)
    with pytest.raises(DataError, match=r"the run's counters differ from its plan"):
        audit(plan, 30 * G, (1,), states)


class _Broken(Plan):
    """A plan in which one sample has the row of the next sample."""

    def locate(self, samples: np.ndarray) -> Samples:
        located = super().locate(samples)
        row = located.row.copy()
        row[samples == 500] = located.row[samples == 501] if (samples == 501).any() else 0
        return replace(located, row=row)


def test_a_plan_that_repeats_a_row_is_detected(built: Built) -> None:
    plan = _Broken(**vars(plan_of(config(built.path), 32, G, [])))
    with pytest.raises(DataError, match=r"source 0 gives a row twice in epoch 0|rank \d of 2 has another row"):
        audit(plan, 600, (1,))
    with pytest.raises(DataError, match=r"rank \d of 2 has another row than one rank alone"):
        audit(plan, 600, (2,))


def test_without_counters_only_the_plan_is_checked(built: Built) -> None:
    rows = built.manifest.splits["train"].rows
    seen = Recorder()
    result = audit(plan_of(config(built.path), 32, G, []), 3 * rows, (1, 7), progress=seen)
    assert seen.done == seen.totals == {"auditing": 3 * rows}
    assert not result.counters_compared
    assert [(epoch.epoch, epoch.complete) for epoch in result.epochs][:2] == [(0, True), (1, True)]
