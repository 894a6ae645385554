"""The ranks of a run as a heat map: who is slow, who is silent, who is behind, and in which phase each of them is."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.text import Text

from launch.terminal import visible

SILENT = 30.0
"""Seconds without a heartbeat after which a rank counts as silent."""
LIMITS = ((1.5, "red", "slow"), (1.15, "yellow", "slower"))
"""Time of a rank as a multiple of the median -> its colour and its name. Rank 0 calls ranks above 1.5 stragglers."""
FINE = "green"


def heat_map(ranks: Sequence[Mapping[str, Any]], slow: Sequence[int], width: int) -> Text:
    """Return one character for each rank: the first letter of its phase, a capital if the rank is slow.

    A rank that sends no heartbeats is `!`, one that is behind by a step or more is `<`."""
    map_ = Text()
    usual = median(_pace(rank) for rank in ranks) if ranks else 0.0
    newest = max((_whole(rank.get("step")) for rank in ranks), default=0)
    ordered = sorted(ranks, key=lambda rank: rank["rank"])
    label = len(str(len(ranks))) + 2
    columns = max(8, (width - label) // 8 * 8)
    for start in range(0, len(ordered), columns):
        map_.append(f"{start:>{label - 2}}  ", style="dim")
        for rank in ordered[start : start + columns]:
            map_.append(*_cell(rank, rank["rank"] in slow, usual, newest))
        map_.append("\n")
    map_.append(_legend(ordered), style="dim")
    return map_


def _cell(rank: Mapping[str, Any], is_slow: bool, usual: float, newest: int) -> tuple[str, str]:
    letter = visible(rank["phase"][:1]).lower() or "?"
    if _seconds(rank.get("silent_seconds")) > SILENT:
        return "!", "bold magenta"
    if newest - _whole(rank.get("step")) > 0:
        return "<", "bold cyan"
    share = _pace(rank) / usual if usual else 1.0
    colour = next((colour for limit, colour, _ in LIMITS if share > limit), FINE)
    return (letter.upper(), "bold red") if is_slow or colour == "red" else (letter, colour)


def _legend(ranks: Sequence[Mapping[str, Any]]) -> str:
    phases = sorted({visible(rank["phase"]) for rank in ranks})
    letters = ", ".join(f"{phase[:1].lower()} {phase}" for phase in phases if phase)
    return f"{letters}; CAPITAL: slow (over {LIMITS[0][0]} x the median); <: behind; !: silent for {SILENT:.0f} s"


def _pace(rank: Mapping[str, Any]) -> float:
    """Return the seconds of a rank's probe, the same work on every rank: a step takes all ranks equally long."""
    return _seconds(rank.get("probe_seconds"))


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0
