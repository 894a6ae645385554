"""The curve of a run has each step once."""

from train.records.curve import curve_of


def record(step: int, loss: float, attempt: int) -> dict[str, float]:
    return {"step": step, "loss": loss, "attempt": attempt}


def test_of_a_repeated_step_the_last_attempt_counts() -> None:
    records = [*(record(step, 5.0, 1) for step in range(1, 8)), *(record(step, 4.0, 2) for step in range(5, 7))]
    curve = curve_of(records)
    assert list(curve) == [1, 2, 3, 4, 5, 6], "step 7 was lost and not repeated"
    assert [curve[step]["attempt"] for step in curve] == [1, 1, 1, 1, 2, 2]


def test_a_validation_loss_joins_the_record_of_its_step() -> None:
    records = [record(1, 5.0, 1), record(2, 4.0, 1), {"time": 9.0, "step": 2, "validation_loss": 4.5}]
    assert curve_of(records)[2] == {"step": 2, "loss": 4.0, "attempt": 1, "validation_loss": 4.5}
    assert "validation_loss" not in curve_of([*records, record(2, 4.1, 2)])[2]
