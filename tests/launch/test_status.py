import json
import time
from pathlib import Path

import pytest

from launch.cli import main
from launch.status import rank_lines, read_status

STATUS = {
    "step": 7,
    "idle_seconds": 1.5,
    "slow": [2],
    "ranks": [
        {"rank": rank, "host": f"node-{rank}", "phase": "data" if rank == 2 else "forward", "probe_seconds": 0.002}
        for rank in range(4)
    ],
}


def test_the_places_of_the_ranks_are_shown_and_slow_ones_named() -> None:
    assert rank_lines(STATUS) == [
        "4 ranks: 1 in data, 3 in forward; the last of them got on 2 s before",
        "rank 2 on node-2 is slow: its probe took 2.00 ms",
    ]
    assert rank_lines({}) == []


def test_a_running_run_shows_its_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.yaml").write_text("train: {steps: 20}\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 7, "loss": 3.0, "time": time.time()}) + "\n")
    (tmp_path / "status.json").write_text(json.dumps(STATUS))
    assert main(["status", str(tmp_path)]) == 0
    assert "rank 2 on node-2 is slow" in capsys.readouterr().out


def test_a_torn_status_is_none(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"step": 7, "ran')
    assert read_status(tmp_path / "status.json") == {}
