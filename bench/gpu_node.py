"""Everything that needs a GPU, in one command: the tests marked `gpu`, then training steps. Results go to one file.

`make gpu`, or `python -m bench.gpu_node [--out build/gpu.txt] [--minutes 12]`. It needs torch >= 2.11 with CUDA and
what Keepstep imports; no network and no DeepSpeed (tests of ZeRO are skipped without it). Each line of output is shown
and written at once, so that a run that is cut short leaves what it has. The exit code is 1 if anything failed.
"""

import argparse
import importlib.util
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import torch

ROOT = Path(__file__).parents[1]
TEST_SECONDS, BENCH_SECONDS = 420, 150
"""Longest time of all tests of one file, and of one measurement."""


def main() -> int:
    """Run what fits into the time; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu.txt", help="file of the results")
    parser.add_argument("--minutes", type=float, default=12.0, help="start nothing new after this time")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    options.out.parent.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    with options.out.open("w", encoding="utf-8") as out:
        show(out, heading())
        if not torch.cuda.is_available():
            show(out, "no CUDA device: nothing was run")
            return 1
        for name, command, seconds in [*gpu_tests(), *measurements(torch.cuda.device_count())]:
            if time.monotonic() > deadline:
                show(out, f"not run, for lack of time: {name}")
            elif not run(out, name, command, seconds):
                failed.append(name)
        show(out, f"failed: {', '.join(failed) or 'nothing'}")
    return 1 if failed else 0


def heading() -> str:
    """The machine and the versions."""
    devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"
    return f"{len(devices)} x {devices[0] if devices else 'no GPU'}, {versions}, {time.strftime('%F %T')}"


def gpu_tests() -> Iterator[tuple[str, list[str], int]]:
    """A command for each file that has tests marked `gpu`: name, command, longest time in seconds."""
    if importlib.util.find_spec("pytest") is None:
        yield "tests", [sys.executable, "-c", "raise SystemExit('pytest is not installed')"], 60
        return
    # Without the project's settings and fixtures, which need plugins that a borrowed machine may lack.
    plain = ["-c", os.devnull, f"--rootdir={ROOT}", "--noconftest", "--import-mode=importlib", "-p", "no:cacheprovider"]
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        if "pytest.mark.gpu" in file.read_text(encoding="utf-8"):
            name = str(file.relative_to(ROOT))
            yield name, [sys.executable, "-m", "pytest", *plain, "-q", "-m", "gpu", name], TEST_SECONDS


def measurements(gpus: int) -> Iterator[tuple[str, list[str], int]]:
    """A command for each measurement: name, command, longest time in seconds."""
    alone = [sys.executable, "-m", "bench.gpu"]
    together = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={gpus}", "-m", "bench.gpu"]
    cases = [(alone, ["--model", model]) for model in ("124M", "llama-1b")]
    cases += [(alone, ["--model", "124M", "--no-compile"]), (alone, ["--model", "llama-1b", "--no-compile"])]
    cases += [(alone, ["--model", "124M", "--cuda-graphs", *options]) for options in ([], ["--no-compile"])]
    if importlib.util.find_spec("torchao") is not None:
        narrow = ["--model", "llama-1b", "--precision", "fp8"]
        cases += [(alone, narrow), (alone, [*narrow, "--fp8-scaling", "tensorwise"])]
    if gpus > 1:
        cases += [(together, ["--model", "llama-1b", "--engine", engine]) for engine in ("ddp", "fsdp2")]
    for command, options in cases:
        yield f"bench.gpu {' '.join(options)}", [*command, *options], BENCH_SECONDS


def run(out: IO[str], name: str, command: Sequence[str], seconds: int) -> bool:
    """Run a command and show its output; return whether it succeeded, or had no test of this kind (pytest's code 5)."""
    began = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds
        )
        text, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        text, code = error.stdout or b"", f"none after {seconds} s"
    lines = text.decode(errors="replace").splitlines()
    succeeded = code in (0, 5)
    show(out, f"== {name}: exit code {code}, {time.monotonic() - began:.0f} s")
    show(out, "\n".join(lines[-5:] if succeeded else lines[-60:]))
    return succeeded


def show(out: IO[str], text: str) -> None:
    """Print a text and write it to the file, at once."""
    for stream in (sys.stdout, out):
        print(text, file=stream, flush=True)


if __name__ == "__main__":
    sys.exit(main())
