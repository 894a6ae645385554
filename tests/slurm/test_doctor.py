"""`keepstep doctor` on the nodes of a real cluster, which connect to each other and run an all-reduce together."""

import json
import sys
from pathlib import Path

from tests.slurm.cluster import Cluster


def test_the_doctor_checks_and_measures_every_node_of_an_allocation(cluster: Cluster) -> None:
    first, second = cluster.names[:2]
    argv = ["srun", "-N2", f"--nodelist={first},{second}", "--ntasks-per-node=1"]
    argv += [sys.executable, "-P", "-m", "launch.cli", "doctor", "--cluster", "--measure", "--json"]
    result = cluster.run("ctl", argv, cwd=Path(__file__).parents[2])
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    figures = {line["host"]: line["figures"] for line in lines if "figures" in line}
    assert set(figures) == {first, second}, result.stdout + result.stderr
    findings = {
        host: [f"{line['level']}: {line['what']}" for line in lines if line["host"] == host and "what" in line]
        for host in figures
    }
    assert "ok: all 1 other nodes connected" in findings[first]
    assert "problem: KillWait is 10 s" in findings[first]
    assert any(line.startswith(f"ok: the clock of {first} is ") for line in findings[second]), findings[second]
    assert f"note: the name {second} resolves to 127.0.1.1 here" in findings[second]
    assert not any("KillWait" in line for line in findings[second])  # only the first node asks Slurm
    for measured in figures.values():
        assert measured["ranks"] == 2
        assert measured["all_reduce_bytes_per_second"] > 0
