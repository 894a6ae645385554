"""The prepared script for a GPU: it finds its tests, records failures, and says where it cannot run."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu_node import ROOT, gpu_tests, measurements, run


def test_every_file_with_gpu_tests_is_run_and_no_other() -> None:
    found = {name for name, _, _ in gpu_tests()}
    assert {"tests/parallel/test_gpu.py", "tests/train/health/test_device_memory.py"} <= found
    assert "tests/parallel/test_engine.py" not in found


def test_several_gpus_are_measured_together() -> None:
    assert not any("torch.distributed.run" in command for _, command, _ in measurements(1))
    assert [command[3] for _, command, _ in measurements(4) if "torch.distributed.run" in command] == [
        "--nproc-per-node=4"
    ] * 2


@pytest.mark.parametrize(
    ("program", "succeeded", "said"),
    [
        ("print('fine')", True, "exit code 0"),
        ("import sys; sys.exit(5)", True, "exit code 5"),
        ("raise SystemExit('broken')", False, "broken"),
        ("import time; print('began', flush=True); time.sleep(600)", False, "exit code none after 3 s"),
    ],
)
def test_what_a_command_prints_is_kept(program: str, succeeded: bool, said: str) -> None:
    out = io.StringIO()
    assert run(out, "a", [sys.executable, "-c", program], 3 if "sleep" in program else 600) is succeeded
    assert said in out.getvalue()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu_node", "--out", str(tmp_path / "out" / "gpu.txt")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert (tmp_path / "out" / "gpu.txt").read_text() == done.stdout
    assert "no CUDA device: nothing was run" in done.stdout


def test_gpu_tests_need_none_of_the_projects_settings() -> None:
    """Collected as on a borrowed machine: without conftest files and plugins."""
    for name, command, _ in gpu_tests():
        done = subprocess.run(
            [*command, "--collect-only", "-p", "no:timeout", "-p", "no:cov"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{name}:\n{done.stdout}"
