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
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    figures = {line["host"]: line["figures"] for line in lines if "figures" in line}
    assert set(figures) == {first, second}, result.stdout + result.stderr
    said = {
        host: [f"{line['level']}: {line['what']}" for line in lines if line["host"] == host and "what" in line]
        for host in figures
    }
    assert "ok: all 1 others called" in said[first]
    assert "problem: KillWait is 10 s" in said[first]
    assert any(line.startswith(f"ok: the clock of {first} is ") for line in said[second]), said[second]
    assert f"note: the name {second} stands for 127.0.1.1 here" in said[second]
    assert not any("KillWait" in line for line in said[second])  # Slurm is asked once
    for measured in figures.values():
        assert measured["ranks"] == 2
        assert measured["all_reduce_bytes_per_second"] > 0
