"""Heartbeats of ranks, and what rank 0 concludes from them: hangs and stragglers. No input or output happens here.

`train.health.watchdog` carries the messages.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

STRAGGLER_FACTOR = 1.5
"""A rank is slow if its probe takes more than this many times the median."""
STRAGGLER_ROUNDS = 3
"""Consecutive slow probes after which a rank is reported as a straggler."""


@dataclass(frozen=True)
class Heartbeat:
    """One rank's report about itself."""

    rank: int
    host: str
    pid: int
    phase: str = "start"
    step: int = 0
    """Optimizer steps finished."""
    phases_entered: int = 0
    """Number of phases entered so far. Ranks that wait for each other have the same number."""
    blocks_moved: int = 0
    """Number of checkpoint blocks read and written so far."""
    sequence: int = 0
    """Number of the message. It increases even while the main thread hangs."""
    location: str = ""
    """Module, line and function that the main thread executes."""
    step_seconds: float = 0.0
    """Seconds that a step's computation took."""
    data_seconds: float = 0.0
    """Seconds that a step waited for data."""
    probe_seconds: float = 0.0
    """Seconds that the probe's matrix product took."""
    readings: dict[str, float] = field(default_factory=dict[str, float])
    """Memory and state of the rank's device (`train.records.device_readings`)."""


@dataclass(frozen=True)
class Hang:
    """Why the run is aborted, and the rank that blocks it; rank is None if all ranks wait at the same point."""

    rank: int | None
    reason: str


class RankMonitor:
    """Rank 0's view of all ranks, computed from their heartbeats and the elapsed seconds alone."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.heartbeats: dict[int, Heartbeat] = {}
        """Newest heartbeat of each rank."""
        self.silent_seconds = dict.fromkeys(range(world_size), 0.0)
        """Seconds since each rank's last heartbeat."""
        self.idle_seconds = 0.0
        """Seconds since any rank made progress."""
        self._slow_rounds: Counter[int] = Counter()
        self._probes: Mapping[int, float] = {}

    def update(self, heartbeats: Mapping[int, Heartbeat], elapsed: float) -> None:
        """Take in the newest heartbeats by rank, `elapsed` seconds after the last update."""
        self.idle_seconds += elapsed
        for rank in range(self.world_size):
            self.silent_seconds[rank] += elapsed
            old, new = self.heartbeats.get(rank), heartbeats.get(rank)
            if new is None:
                continue
            if old is None or new.sequence != old.sequence:
                self.silent_seconds[rank] = 0.0
            if old is None or (new.phases_entered, new.blocks_moved) != (old.phases_entered, old.blocks_moved):
                self.idle_seconds = 0.0
            self.heartbeats[rank] = new
        self._count_slow_rounds()

    def find_hang(self, hang_seconds: float) -> Hang | None:
        """The hang, if no rank made progress for `hang_seconds`; else None."""
        if self.idle_seconds < hang_seconds:
            return None
        idle = f"no rank made progress for {self.idle_seconds:.0f} s"
        rank = max(self.silent_seconds, key=lambda rank: self.silent_seconds[rank])
        if self.silent_seconds[rank] > hang_seconds / 2:
            cause = f"rank {rank} sends no heartbeats: its process is stopped or its node is down"
            return Hang(rank, f"{idle}; {cause}; {self._last_seen(rank)}")
        behind = _furthest_behind(list(self.heartbeats.values()))
        if behind is None:
            return Hang(None, f"{idle}; all ranks wait at the same point: {self._last_seen(0)}")
        return Hang(behind, f"{idle}; rank {behind} is behind the others: {self._last_seen(behind)}")

    def live_ranks(self, hang_seconds: float) -> list[int]:
        """Return the ranks that still send heartbeats when the run hangs."""
        return [rank for rank, seconds in self.silent_seconds.items() if seconds <= hang_seconds / 2]

    def stragglers(self) -> list[int]:
        """Ranks that were slow in each of the last STRAGGLER_ROUNDS probes, in ascending order."""
        return sorted(rank for rank, rounds in self._slow_rounds.items() if rounds >= STRAGGLER_ROUNDS)

    def _last_seen(self, rank: int) -> str:
        heartbeat = self.heartbeats.get(rank)
        if heartbeat is None:
            return "no heartbeat was ever received"
        return (
            f"phase {heartbeat.phase}, {heartbeat.step} steps done, in {heartbeat.location} "
            f"(process {heartbeat.pid} on {heartbeat.host})"
        )

    def _count_slow_rounds(self) -> None:
        probes = {rank: heartbeat.probe_seconds for rank, heartbeat in self.heartbeats.items()}
        if len(probes) < self.world_size or self._probes == probes or not all(probes.values()):
            return
        self._probes = probes
        self._slow_rounds = Counter({rank: self._slow_rounds[rank] + 1 for rank in slow_ranks(probes)})


def slow_ranks(probes: Mapping[int, float]) -> list[int]:
    """Ranks whose probe took more than STRAGGLER_FACTOR times the median. `probes`: seconds by rank."""
    usual = median(probes.values())
    return [rank for rank, seconds in probes.items() if seconds > STRAGGLER_FACTOR * usual]


def _furthest_behind(heartbeats: list[Heartbeat]) -> int | None:
    """The rank that entered the fewest phases. If all entered equally many, the rank at the rarest location, preferring
    one outside torch: the others wait for it in a collective. None if all ranks are at the same location."""
    lowest = min(heartbeats, key=lambda heartbeat: heartbeat.phases_entered)
    if any(heartbeat.phases_entered != lowest.phases_entered for heartbeat in heartbeats):
        return lowest.rank
    counts = Counter(heartbeat.location for heartbeat in heartbeats)
    rarest = min(heartbeats, key=lambda one: (counts[one.location], one.location.startswith("torch.")))
    return rarest.rank if len(counts) > 1 else None
