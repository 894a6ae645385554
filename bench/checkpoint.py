"""Times checkpoints against torch.save, DCP's own writer, DeepSpeed's and dd, in one run on one disk.

    OMP_NUM_THREADS=1 python bench/checkpoint.py [--megabytes 1500] [--rounds 5] [--folder /tmp/keepstep-bench]

One process holds the state of an AdamW run (weights and two moments, fp32). Every way of saving and loading it is timed
once per round, in turn, so that all meet the same noise; the medians are printed, and ratios to dd, to DCP and to a
memory copy. Reads are cold: files leave the page cache first. Then two ranks resume together, and last the steps of a
busy loop are timed with and without a save behind them. Prints Markdown for docs/benchmarks.md.
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


def make_state(megabytes: int) -> dict[str, Tensor]:
    """Of a model with blocks of 4 matrices and 2 norms, 1,024 wide: weights and two moments."""
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
    return sum(tensor.nbytes for tensor in state.values())


def timed(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def sync_tree(folder: Path) -> None:
    """fsync what others do not: their files, then their folder."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def forget(folder: Path) -> None:
    """Drop the files from the page cache, so that a read is one of the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def fresh(folder: Path) -> Path:
    """An empty folder, and a disk that has done with what was written or removed before."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.sync()
    return folder


def manager(folder: Path, background: bool) -> CheckpointManager:
    def record(kind: str, **details: object) -> None:
        if kind != "saved":
            raise AssertionError(details)

    return CheckpointManager(folder, CheckpointConfig(background=background, keep_last=1), {}, record)


def time_dd(folder: Path, size: int, times: Times) -> None:
    file, blocks = fresh(folder) / "file", str(size // 2**22)
    write = ["dd", "if=/dev/zero", f"of={file}", "bs=4M", f"count={blocks}", "conv=fsync", "status=none"]
    times["dd write"].append(timed(lambda: subprocess.run(write, check=True)))
    forget(folder)
    read = ["dd", f"if={file}", "of=/dev/null", "bs=4M", "status=none"]
    times["dd read"].append(timed(lambda: subprocess.run(read, check=True)))


def time_torch(folder: Path, state: dict[str, Tensor], target: dict[str, Tensor], times: Times) -> None:
    def save() -> None:
        torch.save(state, folder / "state.pt")
        sync_tree(folder)

    def load() -> None:
        for name, tensor in torch.load(folder / "state.pt", weights_only=True).items():
            target[name].copy_(tensor)

    fresh(folder)
    times["torch.save + fsync"].append(timed(save))
    forget(folder)
    times["torch.load"].append(timed(load))


def time_dcp(folder: Path, state: dict[str, Tensor], target: dict[str, Tensor], times: Times) -> None:
    wrapped: dict[str, Any] = dict(state)

    def save() -> None:
        dcp.save(wrapped, checkpoint_id=folder)
        sync_tree(folder)

    fresh(folder)
    times["DCP save + fsync"].append(timed(save))
    forget(folder)
    times["DCP load"].append(timed(lambda: dcp.load(dict(target), checkpoint_id=folder)))


def time_dcp_async(folder: Path, state: dict[str, Tensor], times: Times) -> None:
    fresh(folder)
    began = time.perf_counter()
    future = dcp.async_save(dict(state), checkpoint_id=folder, process_group=CHECKPOINT_GROUP)
    times["DCP async: stall"].append(time.perf_counter() - began)
    assert not isinstance(future, AsyncSaveResponse)
    future.result()
    times["DCP async: whole"].append(time.perf_counter() - began)


def time_ours(folder: Path, state: dict[str, Tensor], target: dict[str, Tensor], times: Times, saver: Any) -> None:
    """In the background (`saver`, whose memory is warm after its first save), in the foreground, and loading."""
    fresh(folder.with_name("background"))
    began = time.perf_counter()
    saver.save(SavedProgress(1, 1), state, {})
    times["Keepstep async: stall"].append(time.perf_counter() - began)
    saver.wait()
    times["Keepstep async: whole"].append(time.perf_counter() - began)
    sync = manager(fresh(folder), background=False)
    times["Keepstep save"].append(timed(lambda: sync.save(SavedProgress(1, 1), state, {})))
    forget(folder)
    times["Keepstep load"].append(timed(lambda: sync.load_newest(target)))
    sync.close()
    assert all(torch.equal(state[name], target[name]) for name in state)


def deepspeed_engine(size: int) -> Any:
    """ZeRO-1 over one rank with about as many bytes of state (it keeps fp32 weights twice)."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # else it warns, between the tables, that it found no other
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
    def save() -> None:
        engine.save_checkpoint(str(folder), tag="x")
        sync_tree(folder)

    fresh(folder)
    times["DeepSpeed save + fsync"].append(timed(save) * SIZES["state"] / _tree_bytes(folder))
    forget(folder)
    seconds = timed(lambda: engine.load_checkpoint(str(folder), tag="x"))
    times["DeepSpeed load"].append(seconds * SIZES["state"] / _tree_bytes(folder))


def _tree_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


SIZES: dict[str, int] = {}
CHECKPOINT_GROUP: Any = None


def compare(folder: Path, megabytes: int, rounds: int) -> None:
    """All ways of saving and loading, in turn."""
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
        time_ours(folder / "keepstep", state, target, times, saver)
        time_dd(folder / "dd", SIZES["state"], times)
        time_torch(folder / "torch", state, target, times)
        time_dcp(folder / "dcp", state, target, times)
        time_dcp_async(folder / "dcp-async", state, times)
        time_deepspeed(folder / "deepspeed", engine, times)
    report(times, _tree_bytes(folder / "keepstep"))
    saver.close()


def report(times: Times, written: int) -> None:
    middle = {name: statistics.median(values) for name, values in times.items()}
    size = SIZES["state"]
    print(
        f"State: {size / 1e9:.2f} GB in one process; {len(times['dd write'])} rounds, medians (smallest to largest).\n"
    )
    print("| what | seconds | GB/s | against dd |\n| --- | --- | --- | --- |")
    for name, values in times.items():
        versus = middle["dd read" if "load" in name or name == "dd read" else "dd write"] / middle[name]
        against = "" if "stall" in name or name == "memory copy" else f"{versus:.2f} of its speed"
        spread = f"{middle[name]:.3f} ({min(values):.3f} to {max(values):.3f})"
        print(f"| {name} | {spread} | {size / middle[name] / 1e9:.2f} | {against} |")
    print("\n| bar | wanted | measured |\n| --- | --- | --- |")
    stall = middle["Keepstep async: stall"]
    bars = [
        ("stall over a memory copy", "< 1.2", stall / middle["memory copy"]),
        ("stall over a synchronous DCP save", "< 0.05", stall / middle["DCP save + fsync"]),
        ("save against dd with fsync", ">= 0.9", middle["dd write"] / middle["Keepstep save"]),
        ("whole background save against dd with fsync", ">= 0.9", middle["dd write"] / middle["Keepstep async: whole"]),
        ("load against dd", ">= 0.9", middle["dd read"] / middle["Keepstep load"]),
        ("save against DCP's own writer", "> 1", middle["DCP save + fsync"] / middle["Keepstep save"]),
        ("load against DCP's own reader", "> 1", middle["DCP load"] / middle["Keepstep load"]),
        ("bytes beyond the tensors'", "< 0.005", written / size - 1),
    ]
    for name, wanted, value in bars:
        print(f"| {name} | {wanted} | {value:.4f} |" if value < 0.1 else f"| {name} | {wanted} | {value:.2f} |")


def two_ranks(folder: Path, megabytes: int, rounds: int) -> None:
    """Resume on two ranks, each with half of every tensor, against two dd that read half each."""
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
            forget(run)
            dist.barrier()
            began = time.perf_counter()
            action()
            dist.barrier()
            seconds.append(time.perf_counter() - began)
    if rank == 0:
        resume, raw = statistics.median(resumes), statistics.median(reads)
        print("\n| two ranks | seconds |\n| --- | --- |")
        print(f"| resume (find, read, verify) | {resume:.3f} |\n| two dd, half each | {raw:.3f} |")
        print(f"\nResume over the read: {resume / raw:.2f} (wanted < 1.5).", flush=True)


def slow_down(folder: Path, megabytes: int, rounds: int) -> None:
    """Steps of a loop that keeps one core busy, or both, with and without a save going on behind: large products, and
    many small operations as of a loop that launches kernels, which needs Python's lock all the time."""
    state = make_state(megabytes)
    saver = manager(fresh(folder / "steps"), background=True)
    saver.save(SavedProgress(0, 0), state, {})
    saver.wait()
    large, small = torch.randn(512, 512), torch.zeros(1)
    steps = {
        "large products": lambda: [large @ large for _ in range(8)],
        "small operations": lambda: [small + small for _ in range(20_000)],
    }
    print("\n| step | busy cores | alone, ms | beside a save, ms | slower by |\n| --- | --- | --- | --- | --- |")
    for (name, step), cores in itertools.product(steps.items(), (1, 2)):
        burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores - 1)]
        alone, beside = [], []
        for number in range(rounds):
            alone += [timed(step) for _ in range(20)]
            saver.save(SavedProgress(number + 1, 0), state, {})
            assert saver._saving is not None
            while not saver._saving[2].done():
                beside.append(timed(step))
            saver.wait()
        for burner in burners:
            burner.kill()
            burner.wait()
        before, during = statistics.mean(alone), statistics.mean(beside)
        slower = 100 * (during / before - 1)
        print(f"| {name} | {cores} of {os.cpu_count()} | {1000 * before:.1f} | {1000 * during:.1f} | {slower:.0f} % |")
    saver.close()


def main() -> None:
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
