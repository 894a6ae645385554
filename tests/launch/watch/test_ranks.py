from typing import Any

from launch.watch.ranks import heat_map


def rank(number: int, **changes: Any) -> dict[str, Any]:
    fine = {"rank": number, "host": "n1", "phase": "forward", "step": 7, "silent_seconds": 1.0, "probe_seconds": 0.001}
    return fine | changes


def test_the_map_shows_phase_slow_silent_and_late_ranks() -> None:
    ranks = [rank(n) for n in range(20)]
    ranks[3] |= {"phase": "data"}
    ranks[5] |= {"probe_seconds": 0.0017}
    ranks[6] |= {"silent_seconds": 99.0}
    ranks[17] |= {"step": 6}
    ranks[18] |= {"probe_seconds": 0.0012}
    drawn = heat_map(ranks, slow=[2], width=25)
    first, second, legend = drawn.plain.splitlines()
    assert first == " 0  ffFdfF!fffffffff"
    assert second == "16  f<ff"
    assert legend.startswith("d data, f forward; CAPITAL: slow")
    colours = {drawn.plain[span.start]: span.style for span in drawn.spans if span.end - span.start == 1}
    assert (colours["F"], colours["!"], colours["<"]) == ("bold red", "bold magenta", "bold cyan")


def test_ranks_that_have_not_said_how_fast_they_are_count_as_fine() -> None:
    ranks = [{"rank": n, "host": "n1", "phase": "start", "probe_seconds": 0.0} for n in range(4)]
    assert heat_map(ranks, slow=[], width=80).plain.splitlines()[0] == "0  ssss"
    assert heat_map([], slow=[], width=80).plain.count("\n") == 0
