"""Times checkpoints against torch.save, DCP's own writer, DeepSpeed's and dd, in one run on one disk.

    OMP_NUM_THREADS=1 python bench/checkpoint.py [--megabytes 1500] [--rounds 5] [--folder /tmp/keepstep-bench]

One process holds the state of an AdamW run (weights and two moments, fp32). Each round times every way to save and load
the state once, in turn, so that noise affects all of them alike. The medians are printed, and ratios to dd, to DCP and
to a memory copy. Reads are cold: files are dropped from the page cache first. The other parts time a resume on two
ranks, and the steps of a busy loop with and without a save in the background. Prints Markdown for docs/benchmarks.md.
"""

import argparse
import itertools
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from parallel.fragments import FlatFragment
from train.checkpoint.manager import CheckpointManager, SavedProgress
from train.config import CheckpointConfig

Times = dict[str, list[float]]
"""Seconds in each round, by what was timed."""


def make_state(megabytes: int) -> dict[str, Tensor]:
    """Weights and two moments of a model with blocks of 4 matrices and 2 norms, 1,024 wide; at least this large."""
    width, state, size = 1024, {}, 0
    layer = 0
    while size < megabytes * 10**6:
        shapes = {
            "query": (width, width),
            "output": (width, width),
            "up": (4 * width, width),
            "down": (width, 4 * width),
        }
        for name, shape in (shapes | {"norm": (width,), "mlp_norm": (width,)}).items():
            for kind in ("model.{}", "optim.{}.exp_avg", "optim.{}.exp_avg_sq"):
                tensor = torch.randn(shape)
                state[kind.format(f"layers.{layer}.{name}.weight")] = tensor
                size += tensor.nbytes
        layer += 1
    return state


def size_of(state: dict[str, Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())


def timed(action: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def sync_tree(folder: Path) -> None:
    """fsync all files and then the folder, for writers that do not."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def drop_from_cache(folder: Path) -> None:
    """Drop the files from the page cache, so that the next read comes from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def fresh(folder: Path) -> Path:
    """Empty a folder and wait until the disk has finished all earlier writes; returns the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.sync()
    return folder


def manager(folder: Path, background: bool) -> CheckpointManager:
    """Keepstep's checkpoint manager; any failure raises AssertionError."""

    def record(kind: str, **details: object) -> None:
        if kind != "saved":
            raise AssertionError(details)

    return CheckpointManager(folder, CheckpointConfig(background=background, keep_last=1), {}, record)


def time_dd(folder: Path, size: int, times: Times) -> None:
    """Time a write and a read of `size` bytes by dd."""
    file, blocks = fresh(folder) / "file", str(size // 2**22)
    write = ["dd", "if=/dev/zero", f"of={file}", "bs=4M", f"count={blocks}", "conv=fsync", "status=none"]
    times["dd write"].append(timed(lambda: subprocess.run(write, check=True)))
    drop_from_cache(folder)
    read = ["dd", f"if={file}", "of=/dev/null", "bs=4M", "status=none"]
    times["dd read"].append(timed(lambda: subprocess.run(read, check=True)))


def time_torch(folder: Path, state: dict[str, Tensor], target: dict[str, Tensor], times: Times) -> None:
    """Time torch.save and torch.load."""

    def save() -> None:
        torch.save(state, folder / "state.pt")
        sync_tree(folder)

    def load() -> None:
        for name, tensor in torch.load(folder / "state.pt", weights_only=True).items():
            target[name].copy_(tensor)

    fresh(folder)
    times["torch.save + fsync"].append(timed(save))
    drop_from_cache(folder)
    times["torch.load"].append(timed(load))


def time_dcp(folder: Path, state: dict[str, Tensor], target: dict[str, Tensor], times: Times) -> None:
    """Time a synchronous save and a load of DCP, torch's distributed checkpoint."""
    wrapped: dict[str, Any] = dict(state)

    def save() -> None:
        dcp.save(wrapped, checkpoint_id=folder)
        sync_tree(folder)

    fresh(folder)
    times["DCP save + fsync"].append(timed(save))
    drop_from_cache(folder)
    times["DCP load"].append(timed(lambda: dcp.load(dict(target), checkpoint_id=folder)))


def time_dcp_async(folder: Path, state: dict[str, Tensor], times: Times) -> None:
    """Time an asynchronous save of DCP: the stall, and the time until it is complete."""
    fresh(folder)
    began = time.perf_counter()
    future = dcp.async_save(dict(state), checkpoint_id=folder, process_group=CHECKPOINT_GROUP)
    times["DCP async: stall"].append(time.perf_counter() - began)
    assert not isinstance(future, AsyncSaveResponse)
    future.result()
    times["DCP async: whole"].append(time.perf_counter() - began)


def time_keepstep(folder: Path, state: dict[str, Tensor], target: dict[str, Tensor], times: Times, saver: Any) -> None:
    """Time a save in the background, one in the foreground, and a load.

    `saver` saves in the background; after its first save its host memory is allocated."""
    fresh(folder.with_name("background"))
    began = time.perf_counter()
    saver.save(SavedProgress(1, 1), state, {})
    times["Keepstep async: stall"].append(time.perf_counter() - began)
    saver.wait()
    times["Keepstep async: whole"].append(time.perf_counter() - began)
    sync = manager(fresh(folder), background=False)
    times["Keepstep save"].append(timed(lambda: sync.save(SavedProgress(1, 1), state, {})))
    drop_from_cache(folder)
    times["Keepstep load"].append(timed(lambda: sync.load_newest(target)))
    sync.close()
    assert all(torch.equal(state[name], target[name]) for name in state)


def deepspeed_engine(size: int) -> Any:
    """A ZeRO-1 engine on one rank with about as many bytes of state (it holds fp32 weights twice)."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # otherwise it prints a warning between the tables
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False, auto_mpi_discovery=False)
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(max(1, size // 12 // 2048**2))])
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    engine.backward(engine(torch.randn(1, 2048, dtype=torch.bfloat16)).float().sum())
    engine.step()
    return engine


def time_deepspeed(folder: Path, engine: Any, times: Times) -> None:
    """Time a save and a load of DeepSpeed, scaled to the bytes of the state."""

    def save() -> None:
        engine.save_checkpoint(str(folder), tag="x")
        sync_tree(folder)

    fresh(folder)
    times["DeepSpeed save + fsync"].append(timed(save) * SIZES["state"] / _tree_bytes(folder))
    drop_from_cache(folder)
    seconds = timed(lambda: engine.load_checkpoint(str(folder), tag="x"))
    times["DeepSpeed load"].append(seconds * SIZES["state"] / _tree_bytes(folder))


def _tree_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


SIZES: dict[str, int] = {}
CHECKPOINT_GROUP: Any = None


def compare(folder: Path, megabytes: int, rounds: int) -> None:
    """Time all ways to save and load in turn, and print the tables."""
    global CHECKPOINT_GROUP
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    CHECKPOINT_GROUP = dist.new_group(backend="gloo")
    state = make_state(megabytes)
    SIZES["state"] = size_of(state)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    copy = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    engine = deepspeed_engine(SIZES["state"])
    saver = manager(fresh(folder / "background"), background=True)
    saver.save(SavedProgress(0, 0), state, {})
    saver.wait()
    times: Times = defaultdict(list)
    for _ in range(rounds):
        times["memory copy"].append(timed(lambda: [copy[name].copy_(tensor) for name, tensor in state.items()]))
        time_keepstep(folder / "keepstep", state, target, times, saver)
        time_dd(folder / "dd", SIZES["state"], times)
        time_torch(folder / "torch", state, target, times)
        time_dcp(folder / "dcp", state, target, times)
        time_dcp_async(folder / "dcp-async", state, times)
        time_deepspeed(folder / "deepspeed", engine, times)
    report(times, _tree_bytes(folder / "keepstep"))
    saver.close()


def report(times: Times, written: int) -> None:
    """Print the times and compare them with the targets. `written`: bytes of Keepstep's checkpoint."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    size = SIZES["state"]
    print(
        f"State: {size / 1e9:.2f} GB in one process; {len(times['dd write'])} rounds, medians (smallest to largest).\n"
    )
    print("| operation | seconds | GB/s | relative to dd |\n| --- | --- | --- | --- |")
    for name, values in times.items():
        versus = medians["dd read" if "load" in name or name == "dd read" else "dd write"] / medians[name]
        against = "" if "stall" in name or name == "memory copy" else f"{versus:.2f} of its speed"
        spread = f"{medians[name]:.3f} ({min(values):.3f} to {max(values):.3f})"
        print(f"| {name} | {spread} | {size / medians[name] / 1e9:.2f} | {against} |")
    print("\n| quantity | target | measured |\n| --- | --- | --- |")
    stall = medians["Keepstep async: stall"]
    quantities = [
        ("stall relative to a memory copy", "< 1.2", stall / medians["memory copy"]),
        ("stall relative to a synchronous DCP save", "< 0.05", stall / medians["DCP save + fsync"]),
        ("speed of a save relative to dd with fsync", ">= 0.9", medians["dd write"] / medians["Keepstep save"]),
        (
            "speed of a whole background save relative to dd with fsync",
            ">= 0.9",
            medians["dd write"] / medians["Keepstep async: whole"],
        ),
        ("speed of a load relative to dd", ">= 0.9", medians["dd read"] / medians["Keepstep load"]),
        ("speed of a save relative to DCP's writer", "> 1", medians["DCP save + fsync"] / medians["Keepstep save"]),
        ("speed of a load relative to DCP's reader", "> 1", medians["DCP load"] / medians["Keepstep load"]),
        ("overhead in bytes, relative to the tensors", "< 0.005", written / size - 1),
    ]
    for name, target, value in quantities:
        print(f"| {name} | {target} | {value:.4f} |" if value < 0.1 else f"| {name} | {target} | {value:.2f} |")


def two_ranks(folder: Path, megabytes: int, rounds: int) -> None:
    """Time a resume on two ranks, each with half of every tensor, and two dd processes that each read half as much."""
    size = size_of(make_state(megabytes)) // 2**22 * 2**22
    run = fresh(folder / "two")
    subprocess.run(
        ["dd", "if=/dev/urandom", f"of={run / 'file'}", "bs=4M", f"count={size // 2**22}", "status=none"], check=True
    )
    children = []
    for rank in range(2):
        if not (child := os.fork()):
            _resume_rank(run, rank, megabytes, rounds)
            os._exit(0)
        children.append(child)
    if any(os.waitpid(child, 0)[1] for child in children):
        sys.exit("the resume on two ranks failed")


def _resume_rank(run: Path, rank: int, megabytes: int, rounds: int) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(run / "store"), 2), rank=rank, world_size=2)
    state: dict[str, Any] = {}
    for name, tensor in make_state(megabytes).items():
        half = tensor.numel() // 2
        state[name] = FlatFragment(
            tensor.flatten()[rank * half : (rank + 1) * half].clone(), tuple(tensor.shape), rank * half
        )
    saver = manager(run / "checkpoints", background=False)
    saver.save(SavedProgress(1, 1), state, {})
    half = (run / "file").stat().st_size // 2
    read = ["dd", f"if={run / 'file'}", "of=/dev/null", "bs=4M", f"skip={rank * half}", f"count={half}"]
    read += ["iflag=skip_bytes,count_bytes", "status=none"]
    resumes, reads = [], []
    for _ in range(rounds):
        for action, seconds in (
            (lambda: saver.load_newest(state), resumes),
            (lambda: subprocess.run(read, check=True), reads),
        ):
            drop_from_cache(run)
            dist.barrier()
            began = time.perf_counter()
            action()
            dist.barrier()
            seconds.append(time.perf_counter() - began)
    if rank == 0:
        resume, raw = statistics.median(resumes), statistics.median(reads)
        print("\n| two ranks | seconds |\n| --- | --- |")
        print(f"| resume (find, read, verify) | {resume:.3f} |\n| two dd, half each | {raw:.3f} |")
        print(f"\nResume relative to the read: {resume / raw:.2f} (target < 1.5).", flush=True)


def slow_down(folder: Path, megabytes: int, rounds: int) -> None:
    """Time the steps of a loop with and without a save in the background, with one busy core or two.

    One kind of step computes large products. The other runs many small operations, like a loop that launches kernels,
    and holds Python's lock all the time."""
    state = make_state(megabytes)
    saver = manager(fresh(folder / "steps"), background=True)
    saver.save(SavedProgress(0, 0), state, {})
    saver.wait()
    large, small = torch.randn(512, 512), torch.zeros(1)
    steps = {
        "large products": lambda: [large @ large for _ in range(8)],
        "small operations": lambda: [small + small for _ in range(20_000)],
    }
    print("\n| step | busy cores | alone, ms | during a save, ms | slower by |\n| --- | --- | --- | --- | --- |")
    for (name, step), cores in itertools.product(steps.items(), (1, 2)):
        burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores - 1)]
        alone, during = [], []
        for number in range(rounds):
            alone += [timed(step) for _ in range(20)]
            saver.save(SavedProgress(number + 1, 0), state, {})
            assert saver._pending is not None
            while not saver._pending.saved.done():
                during.append(timed(step))
            saver.wait()
        for burner in burners:
            burner.kill()
            burner.wait()
        alone_ms, during_ms = 1000 * statistics.mean(alone), 1000 * statistics.mean(during)
        slower = 100 * (during_ms / alone_ms - 1)
        print(f"| {name} | {cores} of {os.cpu_count()} | {alone_ms:.1f} | {during_ms:.1f} | {slower:.0f} % |")
    saver.close()


def main() -> None:
    """Run the parts that the command line names and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/keepstep-bench"))
    parser.add_argument("--parts", nargs="*", default=["two_ranks", "slow_down", "compare"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, 1 thread of torch per process.\n",
        flush=True,
    )
    parts = {"two_ranks": two_ranks, "slow_down": slow_down, "compare": compare}
    for part in options.parts:
        parts[part](options.folder, options.megabytes, options.rounds)
    shutil.rmtree(options.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
