"""A disk or a memory that runs out is reported in one line with what to lower; a bug is not."""

import errno
import json
import re
from pathlib import Path

import pytest
import torch

from train.errors import DeviceMemoryError, ExhaustedError
from train.exit_codes import FAILED, OUT_OF_MEMORY
from train.health.exhausted import PLAN_VARIABLE, exhaustion_in_one_line, memory_ran_out

RUN = Path("/runs/a")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/runs/a/lease.json"),
            r"for /runs/a/lease\.json .*free some",
        ),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), r"no space is left for /runs/a \(Disk quota exceeded\)"),
        (PermissionError(errno.EACCES, "Permission denied", "/runs/a/x"), r"/runs/a/x cannot be written .* runs_dir"),
        (MemoryError(), r"^memory ran out; lower train\.micro_batch_size"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory ran out"),
    ],
)
def test_what_ran_out_is_said_in_one_line(error: Exception, message: str) -> None:
    with pytest.raises(ExhaustedError, match=message) as caught, exhaustion_in_one_line(RUN):
        raise error
    assert caught.value.exit_code == FAILED
    assert "\n" not in str(caught.value)


def test_the_memory_of_a_device_is_a_failure_of_its_own() -> None:
    with pytest.raises(DeviceMemoryError, match=r"\(CUDA out of memory\. Tried to allocate\)") as caught:
        with exhaustion_in_one_line(RUN):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried\nto allocate")
    assert caught.value.exit_code == OUT_OF_MEMORY


def test_torchs_own_error_on_cpu_is_recognized() -> None:
    with pytest.raises(ExhaustedError, match=r"memory ran out .*activation_checkpointing"), exhaustion_in_one_line(RUN):
        torch.empty(1 << 55, dtype=torch.uint8)


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes do not fit"), FileNotFoundError(2, "No such file", "x"), OSError(13, "no", "/etc/x")]
)
def test_any_other_error_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)), exhaustion_in_one_line(RUN):
        raise error


def test_a_plan_stands_beside_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {
        "parts": {"weights": 2**30, "optimizer state": 2**31},
        "changes": ["train.micro_batch_size=2 (saves 1)"],
    }
    monkeypatch.setenv(PLAN_VARIABLE, json.dumps(plan))
    line = memory_ran_out(MemoryError())
    assert re.search(r"this rank held up to \d+\.\d\d GiB, the plan is 3\.00\); set train\.micro_batch_size=2", line)
    assert "\n" not in line
    monkeypatch.delenv(PLAN_VARIABLE)
    assert "plan" not in memory_ran_out(MemoryError())
