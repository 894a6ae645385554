"""Machines that a plan is made for, read from `machines.yaml` or a file of the user's."""

import difflib
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from data_pipeline.untrusted import in_one_line
from launch.plan.activations import Backend
from train.errors import ConfigError
from train.recipe.yaml_text import TooMuchError, parse, read_text

OWN_FILE = Path(__file__).with_name("machines.yaml")
UNMEASURED = 0.8
"""Share of the peak that the fastest product reaches where nobody measured it."""


class Machine(BaseModel):
    """One kind of GPU (or CPU), and what joins several of them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    memory_gb: float = Field(gt=0)
    memory_tb_s: float = Field(gt=0)
    peak_tflops: dict[str, float]
    best_tflops: dict[str, float] = {}
    generation: Literal["ampere", "hopper", "blackwell", "other", "measured"] = "other"
    cpu: bool = False
    """Whether it is a CPU, which all ranks of a machine share."""
    link_gb_s: float = Field(gt=0)
    domain: int = Field(ge=1)
    network_gb_s: float = Field(gt=0)
    watts: float = Field(default=0, ge=0)

    @property
    def memory_bytes(self) -> float:
        """Memory of one GPU."""
        return self.memory_gb * 1e9

    @property
    def memory_bandwidth(self) -> float:
        """Bytes per second of one GPU's memory."""
        return self.memory_tb_s * 1e12

    @property
    def backend(self) -> Backend:
        """What its memory depends on."""
        if not self.cpu:
            return "gpu"
        return "cpu" if self.has("bf16") else "slow_cpu"

    def has(self, precision: str) -> bool:
        """Whether the matrix units multiply in this precision."""
        return _units(precision) in self.peak_tflops

    def best(self, precision: str) -> float:
        """FLOP per second of the fastest product in `precision`: fp32, bf16, fp16, fp8, mxfp8 or nvfp4.

        KeyError if the machine cannot multiply in it; fp32 without a figure of its own counts an eighth of bf16."""
        units = _units(precision)
        if self.cpu and units not in self.peak_tflops:
            units = "fp32"  # train/model/kernels/linear.py
        if units == "fp32" and units not in self.peak_tflops:
            return self.best("bf16") / 8
        return self.best_tflops.get(units, UNMEASURED * self.peak_tflops[units]) * 1e12

    def peak(self, precision: str) -> float:
        """Dense peak in FLOP per second, the denominator of MFU."""
        units = _units(precision)
        other = "fp32" if self.cpu else "bf16"
        return self.peak_tflops.get(units, self.peak_tflops.get(other, 0)) * 1e12


def _units(precision: str) -> str:
    return {"fp16": "bf16", "16bit": "bf16", "mxfp8": "fp8", "nvfp4": "fp4"}.get(precision, precision)


def read_machines(path: Path | None = None) -> dict[str, Machine]:
    """The machines that are known, by name; those in the file at `path` come first. ConfigError if it is malformed."""
    known = _read(OWN_FILE)
    return known if path is None else known | _read(path)


def find_machine(name: str, path: Path | None = None) -> Machine:
    """The machine of that name, whatever its case. ConfigError, with the nearest name, if there is none."""
    machines = read_machines(path)
    if (found := machines.get(name.lower())) is not None:
        return found
    near = difflib.get_close_matches(name.lower(), machines, n=1)
    hint = f"the nearest is {near[0]}" if near else f"known are {', '.join(sorted(machines))}"
    raise ConfigError(f"--gpu {name} is not known: {hint}; add a machine with --machines FILE")


def _read(path: Path) -> dict[str, Machine]:
    try:
        entries = TypeAdapter(dict[str, Machine]).validate_python(parse(read_text(path)))
        return {name.lower(): machine for name, machine in entries.items()}
    except OSError as error:
        raise ConfigError(f"--machines {path}: {error.strerror}") from None
    except TooMuchError:
        raise ConfigError(f"{path} has too many values or levels; launch/plan/machines.yaml shows the format") from None
    except ValidationError as error:
        first = error.errors()[0]
        problem = in_one_line("".join(f"{part}: " for part in first["loc"]) + first["msg"])
        raise ConfigError(f"{path}: {problem}; launch/plan/machines.yaml shows the format") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{path} is not YAML: {reason}; launch/plan/machines.yaml shows the format") from None
