"""Memory, power, clock and temperature of this rank's device, and these values over all ranks.

Each rank's heartbeat carries its readings to rank 0, so no collective is needed. NVML, the library behind nvidia-smi,
is read directly. Without an NVIDIA GPU only the memory of the process is known.
"""

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from train.records.metrics import peak_memory_gib

log = logging.getLogger(__name__)

Readings = dict[str, float]
MEMORY = "memory_gib"
OVER_RANKS: dict[str, Callable[[Sequence[float]], float]] = {
    MEMORY: max,
    "device_power_watts": sum,
    "device_clock_mhz": min,
    "device_temperature_celsius": max,
    "device_alloc_retries": sum,
}
"""How a reading of all ranks becomes one value: the rank that is worst off, or the sum."""
_SM_CLOCK, _GPU_TEMPERATURE = 1, 0
"""NVML's numbers for the clock of the multiprocessors and for the sensor of the GPU."""


def read() -> Readings:
    """Return this rank's readings."""
    readings: Readings = {MEMORY: round(peak_memory_gib(), 3)}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        readings["device_alloc_retries"] = float(torch.cuda.memory_stats().get("num_alloc_retries", 0))
        readings |= _nvml_readings()
    return readings


def over_ranks(readings: Sequence[Mapping[str, float]]) -> Readings:
    """Return one value for each reading that any rank has."""
    found: Readings = {}
    for name, combine in OVER_RANKS.items():
        if values := [one[name] for one in readings if name in one]:
            found[name] = combine(values)
    return found


class Nvml:
    """The device with this UUID, as NVML sees it. OSError or ValueError if NVML is not there or does not know it."""

    def __init__(self, uuid: str, library: Any = None) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1") if library is None else library
        self._call("nvmlInit_v2")
        self._device = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._device))

    def readings(self) -> Readings:
        """Return power, clock and temperature; those that the device does not have are left out."""
        found: Readings = {}
        for name, scale, function, *kind in (
            ("device_power_watts", 1e-3, "nvmlDeviceGetPowerUsage"),
            ("device_clock_mhz", 1.0, "nvmlDeviceGetClockInfo", _SM_CLOCK),
            ("device_temperature_celsius", 1.0, "nvmlDeviceGetTemperature", _GPU_TEMPERATURE),
        ):
            value = ctypes.c_uint()
            if self._library[function](self._device, *map(ctypes.c_uint, kind), ctypes.byref(value)) == 0:
                found[name] = value.value * scale
        return found

    def _call(self, name: str, *arguments: Any) -> None:
        if code := self._library[name](*arguments):
            raise ValueError(f"{name} returned {code}")


_nvml: list[Nvml | None] = []
"""NVML for this rank's device once it was asked for; None if it is not available."""


def _nvml_readings() -> Readings:
    if not _nvml:
        uuid = str(cast(Any, torch.cuda).get_device_properties(torch.cuda.current_device()).uuid)
        try:
            _nvml.append(Nvml(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"))
        except (OSError, ValueError) as error:
            log.info("power, clock and temperature of the device are not logged: %s", error)
            _nvml.append(None)
    return _nvml[0].readings() if _nvml[0] is not None else {}
