"""Events as people read them."""

import pytest

from launch.inspect.events import describe


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"step": 40, "stall_seconds": 0.4804, "removed": [10, 20]}, "step 40, stall 0.5 s, removed 10, 20"),
        (
            {"step": 40, "reason": None, "seconds": {"step": 75.0, "data_wait": 0.2}},
            "step 40, step 1 min 15 s, data wait 0.2 s",
        ),
        ({"attempt": 2, "previous": {"step": 28, "uptime": 85.2}}, "attempt 2, previous (step 28, uptime 1 min 25 s)"),
        ({"tokens": 163_840, "took_seconds": 0.1}, "tokens 163,840, took 0.1 s"),
        (
            {"name": "sources", "old": [{"path": "a", "mirror": None}, {"path": "b"}], "new": [["a", 1], "b"]},
            "name sources, old (path a), (path b), new (a, 1), b",
        ),
        ({"bytes": 30_700_000, "seconds": 2.0, "tier": "shared"}, "30.7 MB, took 2.0 s, tier shared"),
    ],
)
def test_values_have_units_and_nothing_is_shown_for_none(event: dict, text: str) -> None:
    assert describe({"time": 1.0, "uptime": 2.0, "kind": "any", **event}) == text
