"""What nvidia-smi and clusters say about GPUs."""

import pytest

from launch.plan.checked.devices import device_here, device_of_type, read_query


def test_the_memory_that_nvidia_smi_reports_replaces_the_tables():
    device = read_query("NVIDIA H100 80GB HBM3, 81559, Disabled\nNVIDIA H100 80GB HBM3, 81559, Disabled\n")
    assert device is not None
    assert device.machine is not None
    assert device.memory_bytes == device.machine.memory_bytes == 81559 * 2**20
    assert device.machine.best("bf16") == 794.5e12


@pytest.mark.parametrize(
    ("line", "memory_tb_s"),
    [("NVIDIA A100-SXM4-40GB, 40960, Disabled", 1.555), ("NVIDIA A100-SXM4-80GB, 81920, Disabled", 2.0)],
)
def test_of_machines_with_one_name_the_one_with_this_memory_is_meant(line, memory_tb_s):
    device = read_query(line)
    assert device is not None
    assert device.machine is not None
    assert device.machine.memory_tb_s == memory_tb_s


@pytest.mark.parametrize("name", ["NVIDIA GH200 480GB", "NVIDIA H100 PCIe", "Tesla T4"])
def test_of_a_gpu_without_known_speed_only_the_memory_is_known(name):
    device = read_query(f"{name}, 81559, [N/A]")
    assert device is not None
    assert device.machine is None
    assert device.memory_bytes == 81559 * 2**20


@pytest.mark.parametrize("text", ["", "NVIDIA A100-SXM4-40GB, 40960, Enabled", "No devices were found", "a, [N/A], x"])
def test_without_a_whole_gpu_nothing_is_known(text):
    assert read_query(text) is None


def test_without_a_gpu_nothing_is_asked():
    assert device_here({"CUDA_VISIBLE_DEVICES": ""}) is None
    assert device_here({"CUDA_VISIBLE_DEVICES": "MIG-0123"}) is None


def test_a_clusters_name_stands_for_the_largest_gpu_of_that_name():
    device = device_of_type("h100")
    assert device is not None
    assert device.machine is not None
    assert (device.memory_bytes, device.machine.memory_bytes) == (96e9, 80e9)
    device = device_of_type("nvidia_a100-sxm4-40gb")
    assert device is not None
    assert device.memory_bytes == 40e9
    assert device_of_type("gpu") is None
