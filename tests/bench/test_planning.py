"""The planner's constants still reproduce published speeds as well as docs/planning.md says."""

import statistics
from pathlib import Path

import pytest

from bench.planning.__main__ import BEFORE
from bench.planning.errors import order_agreement, row_errors
from bench.planning.fit import flatten, unflatten
from bench.planning.measured import memory_table, read_measured
from bench.planning.published import read_rows
from launch.plan.constants import read_constants


@pytest.fixture(scope="module")
def rows():
    return read_rows()


def test_published_rows_are_read_with_their_layouts(rows):
    assert len(rows) > 500
    assert all(row.arrangement.gpus * row.tokens_per_second > 0 for row in rows)
    by_id = {row.id: row for row in rows}
    row = by_id["mb-025"]  # Llama 3.1 405B, fp8, 1,024 H100: tensor 8, pipeline 8, context 2
    assert (row.arrangement.tensor, row.arrangement.pipeline, row.arrangement.context) == (8, 8, 2)
    assert row.model.parameters == pytest.approx(405_853_388_800, rel=0.001)
    assert "dgxc-175" not in by_id  # its figures contradict themselves


def test_errors_stay_within_what_the_documentation_states(rows):
    errors = row_errors(rows, read_constants(), BEFORE)
    for is_dense, was_fitted, bound in (
        (True, True, 0.06),
        (True, False, 0.15),
        (False, True, 0.2),
        (False, False, 0.3),
    ):
        within = [
            abs(e.within_release)
            for e in errors
            if e.row.is_dense == is_dense and e.was_fitted == was_fitted and e.within_release is not None
        ]
        assert statistics.median(within) < bound, (is_dense, was_fitted)


def test_layouts_come_in_the_published_order_more_often_than_not(rows):
    agreement = order_agreement(rows, read_constants())
    pairs = sum(count for _, count, _ in agreement)
    assert pairs > 1000
    assert sum(count * tau for _, count, tau in agreement) / pairs > 0.6


def test_constants_survive_being_flattened():
    constants = read_constants()
    assert unflatten(flatten(constants)) == constants


def test_the_memory_of_recorded_runs_is_within_10_percent_of_the_plan():
    runs = read_measured()
    engines = {run.recipe.parallel.engine for run in runs}
    assert engines == {"single", "ddp", "fsdp2", "zero1", "zero2", "zero3"}
    assert {run.recipe.parallel.activation_checkpointing for run in runs} == {"none", "selective", "full"}
    for run in runs:
        assert run.plan.memory.total == pytest.approx(run.peak_bytes, rel=0.1), run.settings
    documented = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    assert "\n".join(memory_table(runs)) in documented
