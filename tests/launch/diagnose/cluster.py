"""Writes run folders as a cluster of many ranks would leave them: events, metrics, logs, saved failures, heartbeats."""

import json
import math
import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START = 1_800_000_000.0
"""Moment of the newest start, in seconds since 1970."""
END = START + 3600
NOW = END + 600
JOB = "job77.0"


@dataclass
class Cluster:
    """A run folder of `world_size` ranks, eight on each node."""

    folder: Path
    world_size: int = 1024
    first_step: int = 1
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    metrics: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    logs: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    job: list[str] = field(default_factory=list[str])
    recipe: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    peers_lost: bool = False
    unlike: set[int] = field(default_factory=set[int])
    """Ranks that did not only lose a peer."""

    def event(self, kind: str, at: float = END, **details: Any) -> "Cluster":
        """Add an event."""
        self.events.append({"time": at, "uptime": at - START + 30, "kind": kind, **details})
        return self

    def started(self, saved: int | None = 500, at: float = START) -> "Cluster":
        """Add the start, and a save after it unless `saved` is None."""
        self.event("started", at, attempt=1, world_size=self.world_size, engine="fsdp2", previous=None)
        if saved is not None:
            self.event("saved", at + 1800, step=saved, tier="shared", bytes=1 << 30, seconds=9.0, stall_seconds=0.2)
        return self

    def train(self, losses: Iterable[float], **values: Any) -> "Cluster":
        """Add the records of steps with these losses; `values` are the same in all, or functions of the number."""
        for number, loss in enumerate(losses):
            given = {name: value(number) if callable(value) else value for name, value in values.items()}
            record = {"time": START + 60 + number, "step": self.first_step + number, "loss": loss, "grad_norm": 0.5}
            record |= {"seconds": {"step": 1.0, "data_wait": 0.01}, "attempt": 1, "uptime": 90.0 + number}
            self.metrics.append(record | given)
        return self

    def log(self, rank: int, *lines: str) -> "Cluster":
        """Add lines to the log of a rank."""
        self.logs.setdefault(rank, []).extend(lines)
        return self

    def fails(self, rank: int, error: str, exit_code: int = 1, at: float = END) -> "Cluster":
        """Let a rank fail with an error, and the others lose their peer."""
        self.event("failed", at, rank=rank, exit_code=exit_code, error=error)
        self.log(rank, f"keepstep: {error}").died(rank, f"exit code {exit_code}", [f"keepstep: {error}"], at)
        return self.others_lose_a_peer(rank)

    def others_lose_a_peer(self, *failed: int) -> "Cluster":
        """Let all other ranks say that a connection broke, two of three with a traceback."""
        self.unlike |= {*failed, *self.logs}
        self.peers_lost = True
        return self

    def died(self, rank: int, ending: str, lines: list[str] | None = None, at: float = END) -> "Cluster":
        """Save the rank that failed first on its node."""
        failure = {
            "time": at + 1,
            "rank": rank,
            "host": self.node(rank),
            "ending": ending,
            "log": "",
            "lines": lines or [],
        }
        path = self.folder / "logs" / self.node(rank) / "failure.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(failure | {"suspicion": [False, False, True]}))
        return self

    def heartbeats(self, slow: list[int]) -> "Cluster":
        """Write status.json, and hold the lease."""
        ranks = [self._heartbeat(rank) for rank in range(self.world_size)]
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "status.json").write_text(
            json.dumps({"time": NOW, "step": 7, "idle_seconds": 1.0, "slow": slow, "ranks": ranks})
        )
        return self

    def _heartbeat(self, rank: int) -> dict[str, Any]:
        return {"rank": rank, "host": self.node(rank), "phase": "forward", "step": 7, "probe_seconds": 0.002}

    @staticmethod
    def node(rank: int) -> str:
        """Return the node of a rank."""
        return f"n{rank // 8:03d}"

    def write(self, alive: bool = False) -> Path:
        """Write the folder, as it is when the run has ended, or while it runs; return it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, records in (("events", self.events), ("metrics", self.metrics)):
            if records:
                text = "".join(json.dumps(record) + "\n" for record in records)
                self._file(self.folder / f"{name}.jsonl", text, NOW - 5 if alive else END)
        sections = {"train": {"steps": "100000"}, **self.recipe}
        self._file(self.folder / "recipe.yaml", json.dumps(sections), START)
        if self.logs or self.peers_lost:
            for first in range(0, self.world_size, 8):
                self._write_node(range(first, first + 8))
        if self.job:
            head = "2027-01-15 08:00:00 [job 77 attempt 0] nodes n[000-127] rendezvous at 10.0.0.1:20077"
            self._file(self.folder / "logs" / "slurm-77.log", "\n".join([head, *self.job]) + "\n", END + 5)
        return self.folder

    def _write_node(self, ranks: range) -> None:
        """Write the logs of a node. A node that only lost a peer is a link to one that all clusters share."""
        name = self.node(ranks[0])
        if self.peers_lost and self.unlike.isdisjoint(ranks) and not (self.folder / "logs" / name).exists():
            shared = self.folder.parent / "lost-peers" / name
            if not shared.exists():
                for rank in ranks:
                    self._write_log(shared, rank, _lost_peer(rank))
            (self.folder / "logs").mkdir(exist_ok=True)
            (self.folder / "logs" / name).symlink_to(shared)
            return
        for rank in ranks:
            lost = _lost_peer(rank) if self.peers_lost and rank not in self.unlike else []
            self._write_log(self.folder / "logs" / name, rank, self.logs.get(rank, []) + lost)

    def _write_log(self, node: Path, rank: int, lines: list[str]) -> None:
        header = f"=== 2027-01-15 08:00:00 rank {rank} of {self.world_size}, {JOB}, restart 0"
        self._file(node / f"rank-{rank}.log", "\n".join([header, *lines]) + "\n", END)

    def _file(self, path: Path, text: str, written: float) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (written, written))


def _lost_peer(rank: int) -> list[str]:
    traceback = [f"keepstep: rank {rank} failed:", "Traceback (most recent call last):"] if rank % 3 else []
    return [*traceback, "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:4711"]


def falling(steps: int, noise: float = 0.03) -> list[float]:
    """Return losses of a healthy run: from 10 towards 3, with noise."""
    draw = random.Random(7)
    return [3 + 7 * math.exp(-step / 60) + draw.gauss(0, noise) for step in range(steps)]


def curve(steps: int, loss: Callable[[int], float], noise: float = 0.03) -> list[float]:
    """Return losses by a function of the step, with noise."""
    draw = random.Random(11)
    return [loss(step) + draw.gauss(0, noise) for step in range(steps)]
