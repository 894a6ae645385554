"""The doctor on the nodes of a real cluster, which call each other and add up numbers together."""

import json
import sys
from pathlib import Path

from tests.slurm.cluster import Cluster


def test_every_node_of_an_allocation_is_examined_calls_the_first_and_is_measured(cluster: Cluster) -> None:
    first, second = cluster.names[:2]
    argv = ["srun", "-N2", f"--nodelist={first},{second}", "--ntasks-per-node=1"]
    argv += [sys.executable, "-P", "-m", "launch.cli", "doctor", "--cluster", "--measure", "--json"]
    result = cluster.run("ctl", argv, cwd=Path(__file__).parents[2])
    reports = {report["host"]: report for report in map(json.loads, result.stdout.splitlines())}
    assert set(reports) == {first, second}, result.stdout + result.stderr
    said = {host: [f"{f['level']}: {f['what']}" for f in report["findings"]] for host, report in reports.items()}
    assert "ok: all 1 others called" in said[first]
    assert "problem: KillWait is 10 s" in said[first]
    assert any(line.startswith(f"ok: the clock of {first} is ") for line in said[second]), said[second]
    assert f"note: the name {second} stands for 127.0.1.1 here" in said[second]
    assert not any("KillWait" in line for line in said[second])  # Slurm is asked once
    for report in reports.values():
        assert report["figures"]["ranks"] == 2
        assert report["figures"]["all_reduce_bytes_per_second"] > 0
