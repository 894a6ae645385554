"""Each part of the scale benchmark does its work, at a few ranks."""

from pathlib import Path
from typing import Any

import pytest

from bench.scale import growth
from bench.scale_parts import PARTS

RESULTS: dict[str, Any] = {
    "manifest: joined by rank 0": lambda manifest: b"shard-00015.safetensors" in manifest,
    "manifest: read by each rank": lambda manifest: len(manifest.files) == 16,
    "data states merged on a resume": lambda merged: merged["counters"][0] == [0, 0, 1600, sum(range(16))],
    "fast tier: nodes and their peers": lambda receivers: receivers == [*range(8, 16), *range(8)],
    "`keepstep status`": lambda status: (status.state, status.root_cause["rank"]) == ("failed", 8),
    "root cause from the logs": lambda failure: failure.lines[0].startswith("RuntimeError"),
    "requeue decision": lambda decision: decision == (True, "failed after progress: CUDA error"),
    "health check judged": lambda excluded: excluded == ["n1"],
    "hang: the late rank found": lambda hang: hang.rank == 8,
    "data plan: one rank's next 4,096 samples": lambda rows: len(set(rows.tolist())) == 4096,
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_does_its_work(name: str, tmp_path: Path) -> None:
    result = PARTS[name](16, tmp_path)()
    assert RESULTS.get(name, lambda _: True)(result)


def test_growth_is_an_exponent() -> None:
    assert growth([64, 256, 1024], [1.0, 2.0, 8.0]) == "n^1.00"
    assert growth([256, 1024], [2.0, 32.0]) == "n^2.00"
    assert growth([256, 1024], [0.2, 8.0]) == ""
