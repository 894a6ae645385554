"""Retention keeps the right checkpoints, for any history."""

from hypothesis import given
from hypothesis import strategies as st

from train.checkpoint.retention import steps_to_delete
from train.config import CheckpointConfig

HISTORIES = st.dictionaries(st.integers(1, 60), st.none() | st.floats(0, 10), max_size=20)


@given(HISTORIES, st.integers(1, 4), st.integers(0, 7), st.integers(0, 3))
def test_the_last_the_nth_and_the_best_are_kept_and_no_others(history, last: int, every: int, best: int) -> None:
    config = CheckpointConfig(keep_last=last, keep_every=every, keep_best=best)
    removed = steps_to_delete(history, config)
    kept = set(history) - set(removed)
    evaluated = sorted((loss, step) for step, loss in history.items() if loss is not None)
    for step in history:
        wanted = (
            step in sorted(history)[-last:]
            or (every > 0 and step % every == 0)
            or (history[step], step) in evaluated[:best]
        )
        assert (step in kept) == wanted
