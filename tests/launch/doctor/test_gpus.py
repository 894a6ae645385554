"""Each GPU is judged by what nvidia-smi and the kernel say about it."""

import pytest

from launch.doctor.gpus import RECENT_SECONDS, judge_gpus, judge_nvlinks, judge_xids, problems_of

GPU = """
<gpu id="00000000:{bus}:00.0">
  <product_name>{model}</product_name><minor_number>{number}</minor_number>
  <pci><pci_gpu_link_info><link_widths>
    <max_link_width>16x</max_link_width><current_link_width>{lanes}</current_link_width>
  </link_widths></pci_gpu_link_info></pci>
  <fabric><state>{fabric}</state><status>Success</status></fabric>
  <clocks_event_reasons>
    <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
    <clocks_event_reason_hw_thermal_slowdown>{thermal}</clocks_event_reason_hw_thermal_slowdown>
  </clocks_event_reasons>
  <ecc_errors>
    <volatile><sram_correctable>9</sram_correctable><sram_uncorrectable_parity>0</sram_uncorrectable_parity>
      <dram_uncorrectable>{errors}</dram_uncorrectable></volatile>
    <aggregate><dram_uncorrectable>7</dram_uncorrectable></aggregate>
  </ecc_errors>
  <remapped_rows><remapped_row_corr>3</remapped_row_corr><remapped_row_unc>0</remapped_row_unc>
    <remapped_row_pending>{pending}</remapped_row_pending>
    <remapped_row_failure>{failure}</remapped_row_failure></remapped_rows>
  <temperature><gpu_temp>91 C</gpu_temp></temperature>
</gpu>"""
HEALTHY = {"model": "NVIDIA H100", "lanes": "16x", "fabric": "Completed", "thermal": "Not Active"}
HEALTHY |= {"errors": "0", "pending": "No", "failure": "No"}


def smi(*changes: dict[str, str]) -> str:
    """The output of `nvidia-smi -q -x` for as many GPUs as there are changes."""
    gpus = [GPU.format(**HEALTHY | {"number": n, "bus": f"{n:02X}"} | change) for n, change in enumerate(changes)]
    return f'<?xml version="1.0" ?><nvidia_smi_log>{"".join(gpus)}</nvidia_smi_log>'


def test_healthy_gpus_give_one_line() -> None:
    [finding] = judge_gpus(smi({}, {}))
    assert (finding.level, finding.what[:14]) == ("ok", "2 x NVIDIA H10")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"errors": "2"}, "GPU 1 (00000000:01:00.0) has 2 uncorrected memory errors"),
        ({"errors": "N/A", "pending": "Yes"}, "GPU 1 (00000000:01:00.0) has rows to remap at its next reset"),
        ({"failure": "Yes"}, "GPU 1 (00000000:01:00.0) has rows that could not be remapped"),
        ({"thermal": "Active"}, "GPU 1 (00000000:01:00.0) is slowed down at 91 C: hw_thermal_slowdown"),
        ({"lanes": "8x"}, "GPU 1 (00000000:01:00.0) has 8x of 16x PCIe lanes"),
        ({"fabric": "In Progress"}, "GPU 1 (00000000:01:00.0) has not joined the NVLink fabric (In Progress, Success)"),
        ({"model": "NVIDIA A100"}, "GPUs of several models: 1 x NVIDIA H100, 1 x NVIDIA A100"),
    ],
)
def test_a_fault_of_any_gpu_is_a_problem(change: dict[str, str], problem: str) -> None:
    assert problems_of(list(judge_gpus(smi({}, change)))) == [problem]


def test_a_gpu_with_fewer_links_than_the_others_is_a_problem() -> None:
    lines = ["GPU 0: NVIDIA H100 (UUID: GPU-a)", *(f"\t Link {n}: 26.562 GB/s" for n in range(18))]
    lines += [
        "GPU 1: NVIDIA H100 (UUID: GPU-b)",
        *(f"\t Link {n}: 26.562 GB/s" for n in range(17)),
        "\t Link 17: <inactive>",
    ]
    assert problems_of(list(judge_nvlinks("\n".join(lines)))) == ["inactive NVLinks: GPU 1 has 17 of 18"]
    assert [finding.level for finding in judge_nvlinks("\n".join(lines[:19]))] == ["ok"]
    assert list(judge_nvlinks("GPU 0: NVIDIA L4 (UUID: GPU-c)")) == [], "a GPU without NVLink"


def test_severe_xid_events_of_the_last_day_are_problems() -> None:
    log = """
[    5.1] NVRM: Xid (PCI:0000:18:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[90000.2] NVRM: Xid (PCI:0000:2a:00): 31, pid=77, name=python, Ch 00000008, MMU Fault
[90001.2] NVRM: Xid (PCI:0000:2a:00): 94, pid=77, name=python, Contained: SM
[90002.2] NVRM: Xid (PCI:0000:2a:00): 94, pid=77, name=python, Contained: SM
[90003.2] nvme nvme0: Xid (PCI:0000:2a:00): 79
"""
    found = list(judge_xids(log, now=90100.0))
    assert [(finding.level, finding.what) for finding in found] == [
        ("note", "GPU 0000:2a:00 reported Xid 31 1 times in a day"),
        ("problem", "GPU 0000:2a:00 reported Xid 94 2 times in a day: a contained memory error"),
    ]
    assert list(judge_xids(log, now=90100.0 + RECENT_SECONDS)) == []
