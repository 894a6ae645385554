"""Peak speeds of GPUs by their datasheets, for model FLOPs utilization (MFU)."""

import platform

import torch

DENSE_BF16_TFLOPS = {
    "GB300": 2450,
    "GB200": 2450,
    "B300": 2250,
    "B200": 2250,
    "GH200": 989,
    "H200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989,
    "H800": 989,
    "H20": 148,
    "A100": 312,
    "L40S": 362,
    "RTX 4090": 165.2,
    "MI355X": 2500,
    "MI325X": 1300,
    "MI300X": 1300,
}
"""Part of torch's device name -> dense bf16 matrix products, 10^12 FLOP per second. The first name that occurs counts.

Sources: the makers' datasheets as collected in stas00/ml-engineering (compute/accelerator/README.md), NVIDIA's
dgxc-benchmarking (README.md), torchtitan (torchtitan/tools/utils.py) and nanochat (nanochat/common.py)."""


def datasheet_peak(device_name: str) -> float | None:
    """Return the dense bf16 peak of a device in FLOP per second; None if its name is not known."""
    found = (tflops for name, tflops in DENSE_BF16_TFLOPS.items() if name in device_name)
    tflops = next(found, None)
    return None if tflops is None else tflops * 1e12


def device_name(device: torch.device) -> str:
    """Return what the device is called; of a CPU only its architecture is known."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"


def device_peak(device: torch.device) -> float | None:
    """Return the dense bf16 peak of this rank's device in FLOP per second; None for a CPU or an unknown device."""
    return datasheet_peak(device_name(device)) if device.type == "cuda" else None
