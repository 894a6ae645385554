"""The memory and the kind of GPUs: of this machine, by nvidia-smi, or by what a cluster calls them. No torch."""

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from launch.plan.machine import Machine, read_machines
from launch.supervise.local import count_gpus

QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,mig.mode.current", "--format=csv,noheader,nounits")
QUERY_SECONDS = 20
"""Longest time that nvidia-smi may take. Without its answer there is no verdict."""
SLOWER_FORMS = re.compile(r"PCIe|NVL\b|Max-Q", re.IGNORECASE)
"""Forms of a GPU whose memory is known, but whose speed is not that of machines.yaml."""


@dataclass(frozen=True)
class Device:
    """A GPU as far as it is known."""

    name: str
    memory_bytes: float
    """Memory of the largest GPU that it can be."""
    machine: Machine | None
    """Its speeds; None if they are not known."""


def device_here(env: Mapping[str, str]) -> Device | None:
    """The GPU of this machine; None without one, if it is divided, or if nvidia-smi does not answer."""
    if not count_gpus(env) or "MIG" in env.get("CUDA_VISIBLE_DEVICES", ""):
        return None
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return read_query(done.stdout)


def read_query(text: str) -> Device | None:
    """The largest GPU in the output of QUERY; None if there is none, or one is divided."""
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines() if line.strip()]
    if not rows or not all(len(row) == 3 and row[1].isdecimal() and row[2] != "Enabled" for row in rows):
        return None
    name, mebibytes, _ = max(rows, key=lambda row: int(row[1]))
    memory = int(mebibytes) * 2.0**20
    near = min(_machines_of(name), key=lambda machine: abs(machine.memory_bytes - memory), default=None)
    if near is None or SLOWER_FORMS.search(name):
        return Device(name, memory, None)
    return Device(name, memory, near.model_copy(update={"memory_gb": memory / 1e9}))


def device_of_type(name: str) -> Device | None:
    """The GPU that a cluster calls so, such as `h100` or `nvidia_a100-sxm4-80gb`; None if no known one is meant."""
    found = list(_machines_of(name))
    stated = re.search(r"(\d+)gb\b", name.replace("_", " "), re.IGNORECASE)
    if stated:
        found = [machine for machine in found if abs(machine.memory_gb - int(stated[1])) < 1]
    if not found:
        return None
    exact = None if SLOWER_FORMS.search(name) else found[0]
    return Device(name, max(machine.memory_bytes for machine in found), exact)


def _machines_of(name: str) -> Iterator[Machine]:
    """The machines whose short name is a word of this one; h100 and h100-500w are both an `H100`."""
    words = re.split(r"[\s_-]+", name.lower())
    return (machine for known, machine in read_machines().items() if known.partition("-")[0] in words)
