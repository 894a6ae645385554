import pytest

from train.records.peaks import datasheet_peak


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA GB200", 2450),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("AMD Instinct MI300X", 1300),
    ],
)
def test_the_datasheet_peak_is_found_by_the_device_name(name: str, tflops: float) -> None:
    assert datasheet_peak(name) == tflops * 1e12


def test_an_unknown_device_has_no_datasheet_peak() -> None:
    assert datasheet_peak("NVIDIA GeForce GTX 1080") is None
