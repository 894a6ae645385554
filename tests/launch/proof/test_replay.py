"""What a replay reports."""

import pytest

from launch.proof.replay import Replay, different_steps
from parallel.errors import LaunchError


def test_a_replay_reports_the_steps_and_ranks_that_differ() -> None:
    one = {step: (1.0 / step, 0.5) for step in range(1, 9)}
    assert different_steps(one, dict(one), 4, 8) == []
    assert different_steps(one, one | {6: (1.0 / 6, 0.25), 7: (9.0, 0.5)}, 4, 8) == [6, 7]
    with pytest.raises(LaunchError, match=r"no metrics of the steps \[9\]"):
        different_steps(one, one, 4, 9)
    wrong = Replay("runs/x", 3, 8, [6, 7], [1])
    assert not wrong.passed
    assert wrong.as_json()["different_steps"] == [6, 7]
    text = wrong.as_text()
    assert "differ from step 6 on" in text
    assert "the weights or moments that rank 1 saved differ" in text
    right = Replay("runs/x", 3, 8, [], None)
    assert right.passed
    assert "no checkpoint of step 8" in right.as_text()
