from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from train.health.heartbeats import SLOW_ROUNDS, Beat, Late, Watch, slow_ranks

TORCH = "torch.distributed.distributed_c10d:3000 all_reduce"


def beats(**by_rank: int) -> dict[int, Beat]:
    """rank -> count, each at its second message."""
    return {int(rank[1:]): Beat(int(rank[1:]), "node", 100, "forward", 7, count) for rank, count in by_rank.items()}


def again(seen: dict[int, Beat], **changes: Mapping[str, object]) -> dict[int, Beat]:
    """The next message of each rank."""
    return {
        rank: replace(beat, pulse=beat.pulse + 1, **changes.get(f"r{rank}", {}))  # pyright: ignore[reportArgumentType]
        for rank, beat in seen.items()
    }


def late_at_last(watch: Watch, seen: dict[int, Beat], rounds: int = 5, **changes: Mapping[str, object]) -> Late:
    """Who is late after so many rounds in which nobody gets on."""
    for _ in range(rounds):
        seen = again(seen, **changes)
        watch.see(seen, 2.0)
    late = watch.late(5.0)
    assert late is not None
    return late


def test_nobody_is_late_while_anybody_gets_on() -> None:
    watch, seen = Watch(2), beats(r0=10, r1=10)
    for count in range(11, 60):
        seen = again(seen, r0={"count": count})
        watch.see(seen, 2.0)
        assert watch.late(5.0) is None


def test_a_rank_that_reads_or_writes_gets_on_but_is_no_further_than_the_others() -> None:
    watch, seen = Watch(2), beats(r0=10, r1=10)
    for moved in range(1, 50):
        seen = again(seen, r1={"moved": moved, "where": "train.checkpoint.fill:20 read"}, r0={"where": TORCH})
        watch.see(seen, 2.0)
        assert watch.late(5.0) is None
    assert late_at_last(watch, seen, rounds=4).rank == 1


def test_the_rank_that_entered_the_fewest_phases_is_late() -> None:
    watch, seen = Watch(3), beats(r0=11, r1=10, r2=11)
    late = late_at_last(watch, seen, rounds=4, r1={"where": "data_pipeline.stream.stream:50 read"})
    assert late.rank == 1
    assert late.why == (
        "no rank got on for 6 s, and rank 1 is the one that is late; phase forward, 7 steps done, "
        "in data_pipeline.stream.stream:50 read (process 100 on node)"
    )


def test_among_ranks_in_the_same_phase_the_one_that_does_not_wait_with_the_others_is_late() -> None:
    for places, late_rank in (((TORCH, TORCH, "user:1 f"), 2), (("user:1 f", TORCH), 0), ((TORCH, "user:1 f"), 1)):
        watch = Watch(len(places))
        seen = {rank: Beat(rank, "node", 1, "forward", 7, 10, where=where) for rank, where in enumerate(places)}
        assert late_at_last(watch, seen).rank == late_rank


def test_if_all_wait_at_the_same_place_no_rank_is_blamed() -> None:
    watch, seen = Watch(2), beats(r0=10, r1=10)
    late = late_at_last(watch, seen, r0={"where": TORCH}, r1={"where": TORCH})
    assert late.rank is None
    assert f"all ranks wait at the same place: phase forward, 7 steps done, in {TORCH}" in late.why


def test_a_rank_that_is_silent_is_late_wherever_the_others_wait() -> None:
    watch, seen = Watch(2), beats(r0=10, r1=11)
    watch.see(seen, 2.0)
    for _ in range(5):
        seen = again(seen) | {1: seen[1]}
        watch.see(seen, 2.0)
    late = watch.late(5.0)
    assert late is not None
    assert late.rank == 1
    assert "rank 1 does not answer: it is stopped or its node is gone" in late.why


def test_a_rank_that_never_spoke_is_late() -> None:
    watch, seen = Watch(2), beats(r0=1)
    late = late_at_last(watch, seen)
    assert late.rank == 1
    assert "it never said a word" in late.why


def test_a_rank_much_slower_than_the_median_is_slow() -> None:
    assert slow_ranks({0: 1.0, 1: 1.1, 2: 1.7, 3: 1.0}) == [2]
    assert slow_ranks({0: 1.0, 1: 1.2}) == []


def test_a_rank_is_called_slow_only_after_several_rounds_and_not_for_ever() -> None:
    watch, seen = Watch(3), beats(r0=1, r1=1, r2=1)

    def round_of(slowness: float, number: int) -> list[int]:
        nonlocal seen
        base = 1.0 + 0.001 * number
        seen = again(
            seen, **{f"r{rank}": {"probe_seconds": base} for rank in (0, 2)}, r1={"probe_seconds": slowness * base}
        )
        watch.see(seen, 2.0)
        watch.see(again(seen), 2.0)  # the same probes, told once more, are no new round
        return watch.slow()

    assert [round_of(2.0, number) for number in range(SLOW_ROUNDS)] == [[]] * (SLOW_ROUNDS - 1) + [[1]]
    assert round_of(1.0, SLOW_ROUNDS) == []


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 4.0)), max_size=60))
def test_a_rank_that_got_on_within_the_limit_keeps_the_run_alive(rounds: list[tuple[int, float]]) -> None:
    """Each round: which rank gets on, and how long the round took."""
    watch, seen = Watch(4), beats(r0=0, r1=0, r2=0, r3=0)
    for number, (rank, elapsed) in enumerate(rounds, 1):
        seen = again(seen, **{f"r{rank}": {"count": number}})
        watch.see(seen, elapsed)
        assert watch.late(5.0) is None
