import pytest

from train.records.live_view import time_left
from train.records.metrics import Speed, utilization


def test_mfu_is_against_the_datasheet_peak_and_the_measured_peak_has_its_own_name() -> None:
    speed = Speed(tokens_per_step=100, flops_per_token=60, measured_peak=2000.0, datasheet_peak=4000.0)
    speeds = speed.of_step(2.0)
    assert speeds == {
        "tokens_per_second": 50.0,
        "model_flops_per_second": 3000.0,
        "share_of_measured_peak": 1.5,
        "mfu": 0.75,
    }
    assert utilization(speeds) == "MFU 75.0%"


def test_without_a_datasheet_peak_there_is_no_mfu() -> None:
    speeds = Speed(100, 60, measured_peak=6000.0, datasheet_peak=None).of_step(2.0)
    assert "mfu" not in speeds
    assert utilization(speeds) == "50% of measured peak"
    assert speeds["share_of_measured_peak"] == pytest.approx(0.5)


def test_the_time_left_does_not_wrap_after_a_day() -> None:
    assert [time_left(seconds) for seconds in (0.4, 3661, 86_399.2)] == ["00:00:00", "01:01:01", "23:59:59"]
    assert time_left(86_400 * 2 + 3 * 3600 + 245) == "2 d 03:04:05"
