"""Measured figures are judged: a slow GPU, and collectives that do not use RDMA."""

from launch.doctor.measure import judge

FAST = {"all_reduce_bytes_per_second": 40e9, "all_gather_bytes_per_second": 45e9, "slowest_of_fastest_device": 0.97}


def test_figures_as_expected_give_no_finding() -> None:
    assert list(judge(FAST, 400.0)) == []
    assert list(judge({"all_gather_bytes_per_second": 1e6}, 0.0)) == [], "without RDMA there is no expectation"
    assert list(judge({}, 400.0)) == []


def test_a_collective_below_a_tenth_of_the_port_is_a_problem() -> None:
    [finding] = judge(FAST | {"all_gather_bytes_per_second": 2e9}, 400.0)
    assert finding.level == "problem"
    assert finding.what.startswith("all-gather runs at ")
    assert finding.what.endswith("/s, with RDMA ports of 400 Gbit/s")


def test_a_gpu_that_is_slower_than_the_others_is_a_problem() -> None:
    [finding] = judge(FAST | {"slowest_of_fastest_device": 0.6}, 400.0)
    assert finding.what == "the slowest GPU of this machine multiplies at 60% of the fastest"
