"""Installed versions, and combinations that are known to fail, for `keepstep doctor`. Imports no package it reports on.

Every row of `KNOWN_BAD` cites a public report in `source`. Rows that maintainers confirmed are problems, single reports
are notes.
"""

import importlib.metadata
import importlib.util
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launch.doctor.finding import Finding

PACKAGES = ("torch", "deepspeed", "transformers", "safetensors", "mpi4py")
Range = tuple[str, str]
"""Versions from the first to before the second; "" means no bound. A package that is not installed is in no range."""


@dataclass(frozen=True)
class KnownBad:
    """A combination of versions that fails."""

    versions: Mapping[str, Range]
    """Range of each package; the row applies if all are inside."""
    why: str
    """The failure."""
    do: str
    """The remedy."""
    source: str
    """URL of the report."""
    level: Literal["note", "problem"] = "problem"
    machine: str = ""
    """Architecture to which the row applies; "": any."""


KNOWN_BAD = (
    KnownBad(
        {"cuda": ("13", ""), "driver": ("", "580")},
        "torch for CUDA 13 finds no GPU under an older driver",
        "upgrade the driver to 580, or install torch for CUDA 12",
        "https://github.com/pytorch/pytorch/pull/162531",
    ),
    KnownBad(
        {"nccl": ("", "2.29.3")},
        "on ARM, collectives that use the proxy hang without an error",
        "pip install the nvidia-nccl package of your CUDA, 2.29.3 or later",
        "https://github.com/NVIDIA/nccl/issues/2353",
        machine="aarch64",
    ),
    KnownBad(
        {"nccl": ("2.29.2", "2.29.3")},
        "a regression makes collectives hang",
        "pip install the nvidia-nccl package of your CUDA, 2.29.3 or later",
        "https://github.com/pytorch/pytorch/pull/174338",
    ),
    KnownBad(
        {"nccl": ("", ""), "driver": ("560", "570")},
        "NCCL is reported to hang with peer-to-peer access between GPUs",
        "upgrade the driver to 570, or try NCCL_P2P_DISABLE=1",
        "https://github.com/dmlc/xgboost/issues/11242",
        level="note",
    ),
    KnownBad(
        {"nccl": ("", ""), "kernel": ("", "5.5")},
        "runs on several GPUs are reported to hang under Linux before 5.5",
        "upgrade the kernel",
        "https://github.com/huggingface/accelerate/issues/1929",
        level="note",
    ),
    KnownBad(
        {"deepspeed": ("0.17.6", "0.18.3")},
        "ZeRO-2 computes wrong gradients",
        "pip install deepspeed==0.19.8",
        "https://github.com/deepspeedai/DeepSpeed/issues/7718",
    ),
    KnownBad(
        {"deepspeed": ("0.18.3", "0.19.4"), "torch": ("2.11", "")},
        "ZeRO-2 in bf16 loses gradients of modules that are used twice in a step",
        "pip install deepspeed==0.19.8",
        "https://github.com/deepspeedai/DeepSpeed/issues/8224",
    ),
)


def installed() -> dict[str, str]:
    """Return the version of each package, of CUDA, NCCL, the driver and the kernel; "" if it is not installed."""
    found = {name: _package(name) for name in PACKAGES}
    found["cuda"] = _cuda_of_torch()
    found["nccl"] = next(filter(None, (_package(f"nvidia-nccl-cu{cuda}") for cuda in (13, 12))), "")
    found["driver"] = driver()
    found["kernel"] = platform.release()
    return found


def version_findings(versions: Mapping[str, str], python: str, machine: str) -> Iterator[Finding]:
    """Yield what is installed, what is too old for Keepstep, and which combinations fail."""
    yield Finding("ok", f"Python {python}, " + ", ".join(f"{n} {v or 'not installed'}" for n, v in versions.items()))
    torch = numbers(versions.get("torch", ""))
    if not torch:
        yield Finding("problem", "torch is not installed", "nothing trains without it", "pip install 'torch>=2.11'")
    elif torch < (2, 11):
        yield Finding(
            "problem", f"torch {versions['torch']}", "FSDP2 and DCP lack features that Keepstep uses", "upgrade to 2.11"
        )
    if versions.get("deepspeed") and numbers(versions["deepspeed"]) < (0, 19, 8):
        yield Finding(
            "problem",
            f"deepspeed {versions['deepspeed']}",
            "the engines zero1 to zero3 read its internal state, which differs before 0.19.8",
            "pip install deepspeed==0.19.8",
        )
    if not versions.get("mpi4py"):
        yield Finding(
            "note", "mpi4py is not installed", "`mpirun python -m train` needs it", "use torchrun, or install it"
        )
    for row in KNOWN_BAD:
        if row.machine in ("", machine) and all(_inside(versions.get(n, ""), r) for n, r in row.versions.items()):
            what = " with ".join(f"{name} {versions[name]}" for name in row.versions)
            yield Finding(
                row.level, what + (f" on {machine}" if row.machine else ""), row.why, f"{row.do}; {row.source}"
            )


def _inside(version: str, bounds: Range) -> bool:
    first, before = bounds
    return bool(version) and numbers(version) >= numbers(first) and (not before or numbers(version) < numbers(before))


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: `6.1.0-18-amd64` gives (6, 1, 0), `2.13.0+cu130` gives (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(word) for word in match[0].split(".")) if match else ()


def driver() -> str:
    """Return the version of the NVIDIA driver; "" if there is none or nvidia-smi fails."""
    if not shutil.which("nvidia-smi"):
        return ""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    result = subprocess.run(query, capture_output=True, text=True, check=False)
    return result.stdout.splitlines()[0] if result.returncode == 0 and result.stdout else ""


def _package(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cuda_of_torch() -> str:
    """Return the CUDA version that torch was built for, from its version.py; packages from PyPI lack it in theirs."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    match = re.search(r"^cuda\b.*=\s*'([\d.]+)'", text, re.MULTILINE)
    return match[1] if match else ""
