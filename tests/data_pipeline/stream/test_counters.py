import numpy as np

from data_pipeline.stream.counters import add, count, from_json, to_json
from data_pipeline.stream.mixture import first_phase, locate
from data_pipeline.stream.order import source_order

ORDERS = [source_order(50, 4), source_order(30, 4)]


def located(samples: np.ndarray):
    return locate([first_phase([2, 1])], ORDERS, 1, samples)


def test_counts_of_parts_add_up_to_the_whole_in_any_order() -> None:
    whole = count(located(np.arange(1000)))
    parts = [count(located(np.arange(1000)[rank::3])) for rank in range(3)]
    assert add(*parts) == add(*parts[::-1]) == whole
    assert sum(rows for rows, _ in whole.values()) == 1000


def test_other_rows_give_another_sum() -> None:
    one, other = count(located(np.arange(10))), count(located(np.arange(1, 11)))
    assert one != other


def test_a_complete_epoch_has_the_same_sum_in_any_order() -> None:
    counts = count(located(np.arange(1000)))
    assert counts[0, 0] == counts[0, 1]
    assert counts[0, 0][0] == 50


def test_counters_survive_json() -> None:
    counts = count(located(np.arange(100)))
    assert from_json(to_json(counts)) == counts
