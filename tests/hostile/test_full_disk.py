"""A full or read-only disk ends a command that writes data or a model with one line, and leaves nothing half-written.

The small disks are file systems in memory, mounted in a namespace of the command. A limit on the size of files, which
needs no rights, fails writes in the middle of a file."""

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data_pipeline.sets import documents, write_jsonl
from tests.train.checkpoint.test_faults import may_mount

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "tests" / "earlier_version" / "run" / "checkpoints" / "step-00000004"
needs_mount = pytest.mark.skipif(not may_mount(), reason="a file system cannot be mounted here; that needs root")
COMMANDS = ["build", "tokenizer", "byte-bpe", "export"]


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Text for a data set and a tokenizer."""
    return write_jsonl(tmp_path / "in.jsonl", documents(400))


def command(name: str, out: Path, inputs: Path, tokenizer: Path) -> list[str]:
    """The arguments of a command that writes `out`."""
    match name:
        case "build":
            more = ["--tokenizer", str(tokenizer), "--workers", "1", "--seq-len", "32"]
            return ["data", "build", str(inputs), "--out", str(out), *more]
        case "export":
            return ["export", str(run_of(inputs)), "--out", str(out)]
        case "tokenizer":
            return ["data", "tokenizer", str(inputs), "--out", str(out), "--vocab-size", "320"]
        case _:
            return ["data", "tokenizer", str(inputs), "--out", str(out), "--vocab-size", "300", "--kind", "byte-bpe"]


def run_of(inputs: Path) -> Path:
    """A run whose checkpoint can be exported: that of an earlier version, with its data set."""
    run = inputs.parent / "run"
    if not run.exists():
        shutil.copytree(CHECKPOINT.parents[1], run)
        recipe = run / "recipe.yaml"
        data = str(CHECKPOINT.parents[2] / "data")
        lines = [
            f"  - path: {data}" if line.strip().startswith("- path:") else line
            for line in recipe.read_text().split("\n")
        ]
        recipe.write_text("\n".join(lines))
    return run


def run(arguments: list[str], before: list[str], limit_bytes: int | None = None) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    return subprocess.run(
        [*before, sys.executable, "-m", "launch.cli", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=1200, preexec_fn=limit,
    )  # fmt: skip


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    [line] = [line for line in done.stderr.splitlines() if line.startswith("keepstep: ")]
    return line


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_is_one_line_and_nothing_is_half_written(
    name: str, inputs: Path, tokenizer: Path, tmp_path: Path
) -> None:
    out = tmp_path / "results" / "out"
    out.parent.mkdir()
    done = run(command(name, out, inputs, tokenizer), [], limit_bytes=2000)
    assert done.returncode == 1, done.stderr[-3000:]
    assert "no space is left for" in one_line(done)
    assert not out.exists()
    left = [path.name for path in tmp_path.rglob("*") if "partial" in path.name]
    assert not left
    assert run(command(name, out, inputs, tokenizer), []).returncode == 0, "the same command works when there is space"
    assert out.exists()


@needs_mount
@pytest.mark.parametrize("name", COMMANDS)
def test_a_read_only_folder_is_one_line(name: str, inputs: Path, tokenizer: Path, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    mount = 'mount -t tmpfs -o ro tmpfs "$0" && exec "$@"'
    done = run(command(name, folder / "out", inputs, tokenizer), ["unshare", "--mount", "sh", "-c", mount, str(folder)])
    assert done.returncode == 2, done.stderr[-3000:]
    assert "cannot be written (Read-only file system)" in one_line(done)


@needs_mount
def test_a_disk_without_a_free_block_is_one_line(inputs: Path, tokenizer: Path, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    mount = 'mount -t tmpfs -o size=8k tmpfs "$0" && "$@"; code=$?; ls -R "$0" >&2; exit $code'
    done = run(
        command("byte-bpe", folder / "out", inputs, tokenizer), ["unshare", "--mount", "sh", "-c", mount, str(folder)]
    )
    assert done.returncode == 1, done.stderr[-3000:]
    assert "No space left on device" in one_line(done)
    assert "tokenizer.json" not in done.stderr.split("results:")[-1], "half a tokenizer was left"


def test_a_file_in_the_place_of_the_output_is_one_line(inputs: Path, tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(json.dumps({}))
    for name in ("build", "tokenizer"):
        done = run(command(name, tmp_path / "file" / "out", inputs, tokenizer), [])
        assert done.returncode == 2, done.stderr[-3000:]
        assert "cannot be written (Not a directory)" in one_line(done)
