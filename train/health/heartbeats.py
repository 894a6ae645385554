"""What ranks tell of themselves, and who keeps the others waiting. Pure.

`train.health.watchdog` carries the messages.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

SLOW_FACTOR = 1.5
SLOW_ROUNDS = 3
"""So often in a row must a rank be slow before it is called so."""


@dataclass(frozen=True)
class Beat:
    """What a rank tells of itself."""

    rank: int
    host: str
    pid: int
    phase: str = "start"
    step: int = 0
    count: int = 0
    """Phases entered so far: ranks at the same place have the same count."""
    moved: int = 0
    """Blocks of checkpoints read and written so far."""
    pulse: int = 0
    """Counts up with each message, whether or not the main thread gets on."""
    where: str = ""
    """Innermost Python call of the main thread."""
    step_seconds: float = 0.0
    data_seconds: float = 0.0
    probe_seconds: float = 0.0


@dataclass(frozen=True)
class Late:
    """Why the run ends, and by whose fault; rank is None if all ranks wait at the same place."""

    rank: int | None
    why: str


class Watch:
    """Rank 0's view of all ranks. Pure: beats and elapsed seconds in."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.beats: dict[int, Beat] = {}
        self.silent = dict.fromkeys(range(world_size), 0.0)
        """Seconds since each rank's last message."""
        self.idle_seconds = 0.0
        """Seconds since any rank got on."""
        self._slow_rounds: Counter[int] = Counter()
        self._probes: Mapping[int, float] = {}

    def see(self, beats: Mapping[int, Beat], elapsed: float) -> None:
        self.idle_seconds += elapsed
        for rank in range(self.world_size):
            self.silent[rank] += elapsed
            old, new = self.beats.get(rank), beats.get(rank)
            if new is None:
                continue
            if old is None or new.pulse != old.pulse:
                self.silent[rank] = 0.0
            if old is None or (new.count, new.moved) != (old.count, old.moved):
                self.idle_seconds = 0.0
            self.beats[rank] = new
        self._count_slow_rounds()

    def late(self, hang_seconds: float) -> Late | None:
        """Who keeps the others waiting, once nobody has got on for so long."""
        if self.idle_seconds < hang_seconds:
            return None
        idle = f"no rank got on for {self.idle_seconds:.0f} s"
        rank = max(self.silent, key=lambda rank: self.silent[rank])
        if self.silent[rank] > hang_seconds / 2:
            what = f"does not answer: it is stopped or its node is gone; {self._place(rank)}"
            return Late(rank, f"{idle}, and rank {rank} {what}")
        behind = _furthest_behind(list(self.beats.values()))
        if behind is None:
            return Late(None, f"{idle}; all ranks wait at the same place: {self._place(0)}")
        return Late(behind, f"{idle}, and rank {behind} is the one that is late; {self._place(behind)}")

    def slow(self) -> list[int]:
        return sorted(rank for rank, rounds in self._slow_rounds.items() if rounds >= SLOW_ROUNDS)

    def _place(self, rank: int) -> str:
        beat = self.beats.get(rank)
        if beat is None:
            return "it never said a word"
        return f"phase {beat.phase}, {beat.step} steps done, in {beat.where} (process {beat.pid} on {beat.host})"

    def _count_slow_rounds(self) -> None:
        probes = {rank: beat.probe_seconds for rank, beat in self.beats.items()}
        if len(probes) < self.world_size or self._probes == probes or not all(probes.values()):
            return
        self._probes = probes
        slow = slow_ranks(probes)
        self._slow_rounds = Counter({rank: self._slow_rounds[rank] + 1 for rank in slow})


def slow_ranks(probes: Mapping[int, float]) -> list[int]:
    """Ranks that needed much longer than most for the same work."""
    usual = median(probes.values())
    return [rank for rank, seconds in probes.items() if seconds > SLOW_FACTOR * usual]


def _furthest_behind(beats: list[Beat]) -> int | None:
    """The rank that entered the fewest phases; among equals the one that is not where the others wait."""
    lowest = min(beats, key=lambda beat: beat.count)
    if any(beat.count != lowest.count for beat in beats):
        return lowest.rank
    places = Counter(beat.where for beat in beats)
    rare = min(beats, key=lambda beat: (places[beat.where], beat.where.startswith("torch.")))
    return rare.rank if len(places) > 1 else None
