"""Readings of devices: NVML's values, and what is logged of all ranks."""

import ctypes
from typing import Any

import pytest

from train.records.device_readings import Nvml, over_ranks, read


class FakeLibrary:
    """NVML with one device, whose temperature is not readable."""

    def __init__(self) -> None:
        self.uuid = b""
        self.values = {"nvmlDeviceGetPowerUsage": 650_500, "nvmlDeviceGetClockInfo": 1755}

    def __getitem__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == "nvmlDeviceGetHandleByUUID":
                self.uuid = arguments[0]
                return 0 if self.uuid == b"GPU-a" else 6
            if name in self.values:
                ctypes.cast(arguments[-1], ctypes.POINTER(ctypes.c_uint))[0] = self.values[name]
                return 0
            return 0 if name == "nvmlInit_v2" else 3

        return call


def test_power_and_clock_are_read_and_what_is_missing_is_left_out() -> None:
    assert Nvml("GPU-a", FakeLibrary()).readings() == {"device_power_watts": 650.5, "device_clock_mhz": 1755.0}


def test_an_unknown_device_is_an_error() -> None:
    with pytest.raises(ValueError, match="nvmlDeviceGetHandleByUUID returned 6"):
        Nvml("GPU-b", FakeLibrary())


def test_the_rank_that_is_worst_off_is_logged() -> None:
    names: list[str] = ["memory_gib", "device_clock_mhz", "device_temperature_celsius", "device_power_watts"]
    ranks = [
        dict(zip(names, values, strict=True)) for values in ((60.0, 1755.0, 61.0, 600.0), (71.5, 1200.0, 88.0, 400.0))
    ]
    assert over_ranks(ranks) == dict(zip(names, (71.5, 1200.0, 88.0, 1000.0), strict=True))
    assert over_ranks([{"memory_gib": 1.0}, {}]) == {"memory_gib": 1.0}


def test_without_a_gpu_the_memory_of_the_process_is_read() -> None:
    assert read()["memory_gib"] > 0


@pytest.mark.gpu
def test_a_gpu_tells_its_power_clock_and_temperature() -> None:
    import torch

    torch.ones(8, device="cuda")
    readings = read()
    assert readings["device_clock_mhz"] > 100
    assert 0 < readings["device_temperature_celsius"] < 120
    assert readings["device_power_watts"] > 10
