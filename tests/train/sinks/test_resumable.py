import json
from pathlib import Path
from typing import Any

import pytest

from train.sinks.resumable import SinkState, history


def write(metrics: Path, *records: dict[str, Any]) -> None:
    metrics.write_text("".join(json.dumps({"time": 1.0, **record}) + "\n" for record in records))


def test_a_state_outlives_its_process(tmp_path: Path) -> None:
    state = SinkState(tmp_path / "state.json")
    assert (state.id, state.last_step) == ("", 0)
    state.begin("abc")
    state.sent(3, ["train/loss"])
    state.sent(2, ["validation/loss"])
    again = SinkState(tmp_path / "state.json")
    assert (again.id, again.last_step) == ("abc", 3)
    assert again.new(3, {"train/loss": 1.0, "validation/loss": 2.0}) == {"validation/loss": 2.0}
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b'{"id": 3, "last": {}}', b'{"id": "a", "last": {"b": "c"}}', b"\xff"]
)
def test_a_foreign_state_is_no_state(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state.json").write_bytes(content)
    state = SinkState(tmp_path / "state.json")
    assert (state.id, state.last_step) == ("", 0)


def test_the_history_has_each_step_once_and_nothing_of_this_attempt(tmp_path: Path) -> None:
    first = [{"step": step, "loss": float(step)} for step in range(1, 8)]  # killed after step 7, resumed from step 4
    first.insert(6, {"step": 6, "validation_loss": 60.0})
    second = [{"step": step, "loss": step + 0.5} for step in range(5, 10)]
    second.insert(2, {"step": 6, "validation_loss": 61.0})
    write(tmp_path / "metrics.jsonl", *first, *second, {"step": 9, "validation_loss": 90.0})
    found = history(tmp_path / "metrics.jsonl", first=3, before=9)
    expected: list[tuple[int, dict[str, float]]] = [
        (3, {"train/loss": 3.0}),
        (4, {"train/loss": 4.0}),
        (5, {"train/loss": 5.5}),
        (6, {"train/loss": 6.5}),
        (6, {"validation/loss": 61.0}),
        (7, {"train/loss": 7.5}),
        (8, {"train/loss": 8.5}),
    ]
    assert found == expected
    assert history(tmp_path / "metrics.jsonl", first=9, before=9) == []
    assert history(tmp_path / "missing.jsonl", first=1, before=9) == []
