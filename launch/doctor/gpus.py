"""Every GPU of this machine: memory errors, remapped rows, clocks, PCIe, NVLink and Xid events, for `keepstep doctor`
and for the health check of Slurm jobs.

The texts come from nvidia-smi and from the kernel's log. The functions that judge them take plain text.
"""

import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree

from launch.doctor.finding import Finding

SECONDS = 60
"""Longest time that nvidia-smi may take. It hangs where a GPU has fallen off the bus."""
SEVERE_XID = {
    48: "an uncorrectable memory error",
    63: "a row of memory is to be remapped",
    64: "a row of memory could not be remapped",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "the GPU's system processor does not answer",
    120: "the GPU's system processor failed",
    140: "an unrecovered memory error",
    143: "the GPU could not start",
}
"""Xid numbers that mean a faulty machine (https://docs.nvidia.com/deploy/xid-errors). The others may be a program's."""
RECENT_SECONDS = 24 * 3600.0
"""Age up to which an Xid event counts."""
SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
WHY_MEMORY = "wrong values, or an aborted run, at any step"


def gpu_findings() -> list[Finding]:
    """Return the findings about all GPUs. Empty without nvidia-smi; a problem if it fails."""
    if not shutil.which("nvidia-smi"):
        return []
    told = output("nvidia-smi", "-q", "-x")
    if told is None:
        what = f"nvidia-smi -q fails, or takes more than {SECONDS} s"
        return [Finding("problem", what, "a GPU may have fallen off the bus", "reset the GPU, or restart the machine")]
    found = list(judge_gpus(told))
    found += judge_nvlinks(output("nvidia-smi", "nvlink", "--status") or "")
    found += judge_xids(output("dmesg") or "", time.clock_gettime(time.CLOCK_BOOTTIME))
    return found


def output(*command: str) -> str | None:
    """Return what a command prints; None if it fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def judge_gpus(xml: str) -> Iterator[Finding]:
    """Yield the findings about each GPU from the output of `nvidia-smi -q -x`, and one if all is well."""
    gpus = ElementTree.fromstring(xml).findall("gpu")  # noqa: S314 - nvidia-smi wrote it
    problems = [finding for number, gpu in enumerate(gpus) for finding in _judge_gpu(_gpu_name(number, gpu), gpu)]
    yield from problems
    models = Counter(gpu.findtext("product_name", "?") for gpu in gpus)
    if len(models) > 1:
        listed = ", ".join(f"{count} x {model}" for model, count in models.items())
        yield Finding(
            "problem", f"GPUs of several models: {listed}", "all wait for the slowest", "exclude this machine"
        )
    if not problems:
        model, count = models.most_common(1)[0] if models else ("no GPU", 0)
        yield Finding("ok", f"{count} x {model}: no memory errors, no pending rows, full clocks and PCIe width")


def _gpu_name(number: int, gpu: ElementTree.Element) -> str:
    return f"GPU {gpu.findtext('minor_number', str(number))} ({gpu.get('id', '?')})"


def _judge_gpu(name: str, gpu: ElementTree.Element) -> Iterator[Finding]:
    volatile = gpu.find("ecc_errors/volatile")
    errors = sum(_number(each.text) for each in volatile if "uncorrectable" in each.tag) if volatile is not None else 0
    if errors:
        yield Finding("problem", f"{name} has {errors} uncorrected memory errors", WHY_MEMORY, "reset or replace it")
    for tag, what in (("pending", "rows to remap at its next reset"), ("failure", "rows that could not be remapped")):
        if gpu.findtext(f"remapped_rows/remapped_row_{tag}", "No") == "Yes":
            yield Finding("problem", f"{name} has {what}", WHY_MEMORY, "reset it; replace it if this comes again")
    yield from _judge_speed(name, gpu)


def _judge_speed(name: str, gpu: ElementTree.Element) -> Iterator[Finding]:
    for reasons in ("clocks_event_reasons", "clocks_throttle_reasons"):  # the second: drivers before 535
        kinds = [kind for kind in SLOWDOWNS if gpu.findtext(f"{reasons}/{reasons[:-1]}_{kind}") == "Active"]
        if kinds:
            degrees = gpu.findtext("temperature/gpu_temp", "?")
            what = f"{name} is slowed down at {degrees}: {', '.join(kinds)}"
            yield Finding("problem", what, "all ranks wait for it", "check cooling and power")
    link = gpu.find("pci/pci_gpu_link_info/link_widths")
    if link is not None and _number(link.findtext("current_link_width")) < _number(link.findtext("max_link_width")):
        what = f"{name} has {link.findtext('current_link_width')} of {link.findtext('max_link_width')} PCIe lanes"
        yield Finding("problem", what, "copies to the host and to network cards are slow", "reseat or replace it")
    fabric = gpu.findtext("fabric/state", "N/A")
    if fabric not in ("Completed", "N/A") or gpu.findtext("fabric/status", "Success") not in ("Success", "N/A"):
        what = f"{name} has not joined the NVLink fabric ({fabric}, {gpu.findtext('fabric/status', '?')})"
        yield Finding("problem", what, "CUDA does not start", "restart nvidia-fabricmanager")


def judge_nvlinks(text: str) -> Iterator[Finding]:
    """Yield the findings about NVLink from the output of `nvidia-smi nvlink --status`. None if there is no link."""
    active: Counter[str] = Counter()
    gpu = ""
    for line in text.splitlines():
        if found := re.match(r"GPU (\d+):", line):
            gpu = found[1]
            active[gpu] += 0
        elif re.search(r"Link \d+: [\d.]+ GB/s", line):
            active[gpu] += 1
    if not any(active.values()):
        return
    most = max(active.values())
    less = [f"GPU {gpu} has {count} of {most}" for gpu, count in active.items() if count < most]
    if less:
        what, why = f"inactive NVLinks: {', '.join(less)}", "exchanges within the node are slow"
        yield Finding("problem", what, why, "reset the GPUs, or restart nvidia-fabricmanager")
    else:
        yield Finding("ok", f"{most} NVLinks active on each of {len(active)} GPUs")


def judge_xids(kernel_log: str, now: float) -> Iterator[Finding]:
    """Yield the findings about the Xid events of the last day. `now`: seconds since the machine started."""
    counts: Counter[tuple[str, int]] = Counter()
    for stamp, gpu, number in re.findall(r"\[\s*([\d.]+)\].*NVRM: Xid \(PCI:([\w:.]+)\): (\d+)", kernel_log):
        if now - float(stamp) < RECENT_SECONDS:
            counts[gpu, int(number)] += 1
    for (gpu, number), count in counts.items():
        what = f"GPU {gpu} reported Xid {number} {count} times in a day"
        if number in SEVERE_XID:
            yield Finding("problem", f"{what}: {SEVERE_XID[number]}", "the run fails there", "reset or replace the GPU")
        else:
            yield Finding("note", what, "a program or a driver failed", "see `dmesg`; watch whether it comes again")


def problems_of(findings: Sequence[Finding]) -> list[str]:
    """Return what the problems among the findings are."""
    return [finding.what for finding in findings if finding.level == "problem"]


def _number(text: str | None) -> int:
    """Return the number that a text begins with, such as 16 for `16x`; 0 if it has none, as `N/A`."""
    found = re.match(r"\d+", text or "")
    return int(found[0]) if found else 0
