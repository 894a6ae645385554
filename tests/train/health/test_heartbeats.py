from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from train.health.heartbeats import STRAGGLER_ROUNDS, Hang, Heartbeat, RankMonitor, slow_ranks

TORCH = "torch.distributed.distributed_c10d:3000 all_reduce"


def heartbeats(**phases_entered: int) -> dict[int, Heartbeat]:
    """A heartbeat of each rank, from keywords such as r0=10: rank 0 has entered 10 phases."""
    ranks = {int(name[1:]): count for name, count in phases_entered.items()}
    return {rank: Heartbeat(rank, "node", 100, "forward", 7, count) for rank, count in ranks.items()}


def next_round(seen: dict[int, Heartbeat], **changes: Mapping[str, object]) -> dict[int, Heartbeat]:
    """The next heartbeat of each rank. `changes`: fields that change, by rank, such as r1={"blocks_moved": 3}."""
    return {
        rank: replace(one, sequence=one.sequence + 1, **changes.get(f"r{rank}", {}))  # pyright: ignore[reportArgumentType]
        for rank, one in seen.items()
    }


def hang_after(
    monitor: RankMonitor, seen: dict[int, Heartbeat], rounds: int = 5, **changes: Mapping[str, object]
) -> Hang:
    """The hang that is found after so many rounds of 2 s in which no rank makes progress."""
    for _ in range(rounds):
        seen = next_round(seen, **changes)
        monitor.update(seen, 2.0)
    hang = monitor.find_hang(5.0)
    assert hang is not None
    return hang


def test_there_is_no_hang_while_any_rank_makes_progress() -> None:
    monitor, seen = RankMonitor(2), heartbeats(r0=10, r1=10)
    for count in range(11, 60):
        seen = next_round(seen, r0={"phases_entered": count})
        monitor.update(seen, 2.0)
        assert monitor.find_hang(5.0) is None


def test_reading_and_writing_blocks_is_progress_but_does_not_put_a_rank_ahead_of_the_others() -> None:
    monitor, seen = RankMonitor(2), heartbeats(r0=10, r1=10)
    for moved in range(1, 50):
        changes = {"blocks_moved": moved, "location": "train.checkpoint.fill:20 read"}
        seen = next_round(seen, r1=changes, r0={"location": TORCH})
        monitor.update(seen, 2.0)
        assert monitor.find_hang(5.0) is None
    assert hang_after(monitor, seen, rounds=4).rank == 1


def test_the_rank_that_entered_the_fewest_phases_is_behind() -> None:
    monitor, seen = RankMonitor(3), heartbeats(r0=11, r1=10, r2=11)
    hang = hang_after(monitor, seen, rounds=4, r1={"location": "data_pipeline.stream.stream:50 read"})
    assert hang.rank == 1
    assert hang.reason == (
        "no rank made progress for 6 s; rank 1 is behind the others: phase forward, 7 steps done, "
        "in data_pipeline.stream.stream:50 read (process 100 on node)"
    )


def test_among_ranks_in_the_same_phase_the_one_outside_the_collective_is_behind() -> None:
    for locations, expected in (((TORCH, TORCH, "user:1 f"), 2), (("user:1 f", TORCH), 0), ((TORCH, "user:1 f"), 1)):
        monitor = RankMonitor(len(locations))
        seen = {
            rank: Heartbeat(rank, "node", 1, "forward", 7, 10, location=location)
            for rank, location in enumerate(locations)
        }
        assert hang_after(monitor, seen).rank == expected


def test_if_all_ranks_wait_at_the_same_point_no_rank_is_named() -> None:
    monitor, seen = RankMonitor(2), heartbeats(r0=10, r1=10)
    hang = hang_after(monitor, seen, r0={"location": TORCH}, r1={"location": TORCH})
    assert hang.rank is None
    assert f"all ranks wait at the same point: phase forward, 7 steps done, in {TORCH}" in hang.reason


def test_a_rank_without_heartbeats_is_named_wherever_the_others_wait() -> None:
    monitor, seen = RankMonitor(2), heartbeats(r0=10, r1=11)
    monitor.update(seen, 2.0)
    for _ in range(5):
        seen = next_round(seen) | {1: seen[1]}
        monitor.update(seen, 2.0)
    hang = monitor.find_hang(5.0)
    assert hang is not None
    assert hang.rank == 1
    assert "rank 1 sends no heartbeats: its process is stopped or its node is down" in hang.reason


def test_a_rank_that_never_sent_a_heartbeat_is_named() -> None:
    monitor, seen = RankMonitor(2), heartbeats(r0=1)
    hang = hang_after(monitor, seen)
    assert hang.rank == 1
    assert "no heartbeat was ever received" in hang.reason


def test_a_rank_much_slower_than_the_median_is_slow() -> None:
    assert slow_ranks({0: 1.0, 1: 1.1, 2: 1.7, 3: 1.0}) == [2]
    assert slow_ranks({0: 1.0, 1: 1.2}) == []


def test_a_rank_is_a_straggler_after_several_slow_rounds_and_until_a_fast_one() -> None:
    monitor, seen = RankMonitor(3), heartbeats(r0=1, r1=1, r2=1)

    def stragglers_after(slowness: float, number: int) -> list[int]:
        nonlocal seen
        base = 1.0 + 0.001 * number
        seen = next_round(
            seen, **{f"r{rank}": {"probe_seconds": base} for rank in (0, 2)}, r1={"probe_seconds": slowness * base}
        )
        monitor.update(seen, 2.0)
        monitor.update(next_round(seen), 2.0)  # the same probes again do not count as a new round
        return monitor.stragglers()

    rounds = [stragglers_after(2.0, number) for number in range(STRAGGLER_ROUNDS)]
    assert rounds == [[]] * (STRAGGLER_ROUNDS - 1) + [[1]]
    assert stragglers_after(1.0, STRAGGLER_ROUNDS) == []


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 4.0)), max_size=60))
def test_progress_of_one_rank_within_the_limit_prevents_an_abort(rounds: list[tuple[int, float]]) -> None:
    """Each round: which rank makes progress, and how long the round took."""
    monitor, seen = RankMonitor(4), heartbeats(r0=0, r1=0, r2=0, r3=0)
    for number, (rank, elapsed) in enumerate(rounds, 1):
        seen = next_round(seen, **{f"r{rank}": {"phases_entered": number}})
        monitor.update(seen, elapsed)
        assert monitor.find_hang(5.0) is None
