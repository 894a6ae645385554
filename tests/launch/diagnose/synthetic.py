"""The synthetic part of the corpus: what faults leave behind in runs of 1,024 ranks, with the right verdict of each."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.launch.diagnose.cluster import END, START, Cluster, curve, falling


@dataclass(frozen=True)
class Label:
    """The right verdict of a case."""

    rule: str
    action: str
    rank: int | None = None
    node: str = ""


@dataclass(frozen=True)
class Made:
    """One synthetic case."""

    label: Label
    build: Callable[[Cluster], object]
    alive: bool = False
    free_bytes: int | None = 1 << 40


NCCL = (
    "[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=811, OpType=ALLREDUCE, "
    "NumelIn=1048576, NumelOut=1048576, Timeout(ms)=600000) ran for 600021 milliseconds before timing out."
)
LOST = "keepstep: node 17 (n017) has not answered for 20 s; ending the ranks of this node, which wait for it"
CANCELLED = "slurmstepd: error: *** STEP 77.0 ON n000 CANCELLED AT 2027-01-15T09:00:00"
CUDA_FULL = "memory ran out (CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.11 GiB)"
WAITS = {"seconds": {"step": 0.5, "data_wait": 0.6}}
OVERSIZED = {"model": {"n_layers": "32", "d_model": "4096", "vocab_size": "32000"}, "optim": {"lr": "3e-3"}}


def _each_rank(cluster: Cluster, line: str) -> Cluster:
    for rank in range(cluster.world_size):
        cluster.log(rank, line.format(rank=rank))
    return cluster


def _job(cluster: Cluster, *lines: str) -> Cluster:
    cluster.job += lines
    return cluster


def _stopped(cluster: Cluster, reason: str) -> Cluster:
    return cluster.started().train(falling(100)).event("stopped", step=100, reason=reason)


def _killed(cluster: Cluster, rank: int, ending: str) -> Cluster:
    return cluster.started().died(rank, ending).others_lose_a_peer(rank)


def _restarted(cluster: Cluster) -> Cluster:
    """The third start since the newest save."""
    for number in range(3):
        cluster.started(saved=None, at=START - 3000 + 1500 * number)
    return cluster


def _failed_again(cluster: Cluster) -> Cluster:
    return _job(_restarted(cluster).others_lose_a_peer(), LOST)


def _spikes(cluster: Cluster) -> Cluster:
    for step in range(6):
        why = "loss 9.1 is above 4.2"
        cluster.event("spike", END - 60 + step, step=40 + step, why=why, data_step=40 + step, first_sample=0)
    return cluster


def _first_step_slow(cluster: Cluster) -> Cluster:
    slow = {"step": 0.9, "compile": 540.0}
    usual = {"step": 1.0}
    return cluster.started().train(falling(80), seconds=lambda number: usual if number else slow)


def _late_rank_memory(cluster: Cluster) -> Cluster:
    """Two ranks fail: rank 90 first, and rank 3 a minute later, by another error."""
    cluster.started().fails(90, "memory ran out (DefaultCPUAllocator: can't allocate memory)")
    return cluster.event("failed", END + 60, rank=3, exit_code=1, error="no space is left for /runs/x")


CASES: Mapping[str, Made] = {
    "device memory before the first step": Made(
        Label("device-memory", "stop", 517, "n064"),
        lambda c: c.started(saved=None).fails(517, CUDA_FULL, 3),
    ),
    "device memory after many steps": Made(
        Label("device-memory-later", "restart", 517, "n064"),
        lambda c: c.started().train(falling(100)).fails(517, CUDA_FULL),
    ),
    "host memory": Made(
        Label("memory", "restart", 12, "n001"),
        lambda c: c.started().fails(12, "memory ran out ([enforce fail] DefaultCPUAllocator: can't allocate memory)"),
    ),
    "the first of two failures counts": Made(Label("memory", "restart", 90, "n011"), _late_rank_memory),
    "killed by the kernel, says Slurm": Made(
        Label("kernel-out-of-memory", "restart"),
        lambda c: _job(
            _killed(c, 700, "signal SIGKILL"), "slurmstepd: error: Detected 1 oom_kill event in StepId=77.0."
        ),
    ),
    "killed by the kernel, says the launcher": Made(
        Label("kernel-out-of-memory", "restart", 700, "n087"),
        lambda c: _killed(c, 700, "signal SIGKILL, after the kernel killed processes for memory"),
    ),
    "killed by nobody known": Made(
        Label("killed", "restart", 700, "n087"), lambda c: _killed(c, 700, "signal SIGKILL")
    ),
    "a crash in native code": Made(Label("crashed", "restart", 41, "n005"), lambda c: _killed(c, 41, "signal SIGSEGV")),
    "a mapped file became shorter": Made(
        Label("sigbus", "stop", 41, "n005"), lambda c: _killed(c, 41, "signal SIGBUS")
    ),
    "a device fell off the bus": Made(
        Label("device-error", "restart", 33, "n004"),
        lambda c: (
            c.started()
            .log(33, "NVRM: Xid (PCI:0000:3b:00): 79, pid=881, GPU has fallen off the bus.")
            .fails(33, "CUDA error: unspecified launch failure")
        ),
    ),
    "an uncorrectable memory error before any save": Made(
        Label("device-error", "restart", 90, "n011"),
        lambda c: c.started(saved=None).fails(90, "CUDA error: uncorrectable ECC error encountered"),
    ),
    "an NVLink error": Made(
        Label("device-error", "restart", 8, "n001"),
        lambda c: c.started().fails(8, "CUDA error: uncorrectable NVLink error detected during the execution"),
    ),
    "an illegal access": Made(
        Label("device-memory-error", "restart", 8, "n001"),
        lambda c: c.started().fails(8, "CUDA error: an illegal memory access was encountered"),
    ),
    "an index out of range on a device": Made(
        Label("device-assert", "stop", 8, "n001"),
        lambda c: c.started().fails(8, "CUDA error: device-side assert triggered"),
    ),
    "a rank with other weights": Made(
        Label("replicas-differ", "restart", 803, "n100"),
        lambda c: c.started().fails(
            5, "rank 803 holds other weights than the 1023 ranks with replicas of them: its memory is faulty"
        ),
    ),
    "a lost node, by heartbeats": Made(
        Label("lost-node", "restart", None, "n017"),
        lambda c: _job(c.started().others_lose_a_peer(), LOST),
    ),
    "a lost node before any save": Made(
        Label("lost-node", "restart", None, "n017"),
        lambda c: (
            c.started(saved=None)
            .others_lose_a_peer()
            .event("lost_node", why="node 17 (n017) has not answered for 20 s")
        ),
    ),
    "a lost node, again and again": Made(Label("lost-node", "stop", None, "n017"), _failed_again),
    "a lost node, says Slurm": Made(
        Label("lost-node", "restart"),
        lambda c: _job(c.started(), f"{CANCELLED} DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***"),
    ),
    "an NCCL time-out": Made(
        Label("collective-time-out", "restart"), lambda c: _each_rank(c.started().died(0, "signal SIGABRT"), NCCL)
    ),
    "a gloo time-out": Made(
        Label("collective-time-out", "restart"),
        lambda c: _each_rank(c.started(), "RuntimeError: Timed out waiting 600000ms for recv operation to complete"),
    ),
    "a hang with a late rank": Made(
        Label("hang-in-collective", "restart", 611, "n076"),
        lambda c: (
            c.started()
            .heartbeats([])
            .event(
                "hang", rank=611, why="no rank made progress for 480 s; rank 611 did not join nccl:all_gather of [[1]]"
            )
        ),
    ),
    "a stopped process": Made(
        Label("stopped-process", "restart", 611, "n076"),
        lambda c: (
            c.started()
            .heartbeats([])
            .event(
                "hang",
                rank=611,
                why="no rank made progress for 480 s; rank 611 sends no heartbeats: its process is stopped or its node "
                "is down; phase forward",
            )
        ),
    ),
    "a hang of all ranks": Made(
        Label("hang", "restart"),
        lambda c: c.started().event(
            "hang", rank=None, why="no rank made progress for 480 s; all ranks wait at the same point: phase save"
        ),
    ),
    "only lost connections": Made(
        Label("lost-peer", "restart"),
        lambda c: c.started().others_lose_a_peer().died(9, "exit code 1", ["RuntimeError: Connection closed by peer"]),
    ),
    "the whole job vanished": Made(Label("interrupted", "restart"), lambda c: c.started().train(falling(100))),
    "the time limit is near": Made(Label("time-limit", "restart"), lambda c: _stopped(c, "SIGUSR2")),
    "the time limit struck": Made(
        Label("time-limit", "restart"), lambda c: _job(c.started(), f"{CANCELLED} DUE TO TIME LIMIT ***")
    ),
    "preempted": Made(
        Label("preempted", "restart"), lambda c: _job(c.started(saved=None), f"{CANCELLED} DUE TO PREEMPTION ***")
    ),
    "killed while it saved": Made(
        Label("stop-took-too-long", "restart"),
        lambda c: _job(c.started(), "keepstep: the ranks did not stop within 150 s; killing them"),
    ),
    "verdicts of before": Made(
        Label("killed", "restart", 700, "n087"),
        lambda c: _job(
            _killed(c, 700, "signal SIGKILL"),
            "keepstep: root cause: memory ran out; node 3 (n003) has not answered; restart: yes; oom_kill",
            "  | slurmstepd: error: Detected 1 oom_kill event in StepId=76.0.",
            "2027-01-15 09:00:00 [job 77 attempt 0] requeue: failed after progress: node 3 (n003) has not answered",
        ),
    ),
    "a peer names the rank that failed": Made(
        Label("lost-peer", "restart", 5, "n000"),
        lambda c: c.started().died(9, "exit code 1", ["rank 5 failed; this rank exits"]).others_lose_a_peer(9),
    ),
    "asked to stop by a signal": Made(Label("terminated", "restart"), lambda c: _stopped(c, "SIGTERM")),
    "cancelled": Made(Label("cancelled", "stop"), lambda c: _job(_stopped(c, "SIGTERM"), f"{CANCELLED} ***")),
    "stopped by command": Made(
        Label("stop-requested", "stop"), lambda c: _stopped(c.event("stop_requested", START - 1), "STOP file")
    ),
    "stopped with Ctrl-C": Made(Label("interrupted-by-user", "stop"), lambda c: _stopped(c, "SIGINT")),
    "a full disk": Made(
        Label("disk-full", "stop", 4, "n000"),
        lambda c: c.started().fails(4, "no space is left for /runs/x (No space left on device); free some space"),
        free_bytes=1 << 20,
    ),
    "a disk that was full": Made(
        Label("disk-was-full", "restart", 4, "n000"),
        lambda c: c.started().fails(4, "no space is left for /runs/x (No space left on device); free some space"),
    ),
    "a read-only disk": Made(
        Label("read-only-disk", "stop", 4, "n000"),
        lambda c: c.started().fails(4, "/runs/x/checkpoints cannot be written (Read-only file system); make it so"),
    ),
    "NaN": Made(
        Label("not-finite", "stop"),
        lambda c: c.started().fails(
            0,
            "the run has diverged: bad step number 11 at data step 90 (loss nan and gradient norm nan must be finite)",
            2,
        ),
    ),
    "diverged by spikes": Made(
        Label("diverged", "stop"),
        lambda c: c.started().fails(
            0, "the run has diverged: bad step number 11 at data step 90 (loss 9.1 is above 4.2), more than 10", 2
        ),
    ),
    "a dead model": Made(
        Label("dead-model", "stop"), lambda c: c.started().fails(0, "the model is dead: the gradient norm is 0", 2)
    ),
    "a checkpoint of a later version": Made(
        Label("checkpoint-of-other-version", "stop", 0, "n000"),
        lambda c: c.started(saved=None).fails(
            0,
            "manifest.json: format keepstep, version 9 with blocks of 4194304 bytes; this Keepstep reads version 3 "
            "with 4194304: use the Keepstep that wrote it (0.9)",
            2,
        ),
    ),
    "an old driver": Made(
        Label("driver-or-library-mismatch", "stop", 64, "n008"),
        lambda c: (
            c.started(saved=None)
            .log(64, "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).")
            .died(64, "exit code 1", ["RuntimeError: The NVIDIA driver on your system is too old"])
            .others_lose_a_peer(64)
        ),
    ),
    "a missing package": Made(
        Label("module-missing", "stop", 64, "n008"),
        lambda c: (
            c.log(64, "ModuleNotFoundError: No module named 'xxhash'")
            .died(64, "exit code 1", ["ModuleNotFoundError: No module named 'xxhash'"])
            .others_lose_a_peer(64)
        ),
    ),
    "a wrong batch size": Made(
        Label("batch-does-not-divide", "stop", 0, "n000"),
        lambda c: c.started(saved=None).fails(
            0,
            "train.global_batch_size (1000) must be a multiple of train.micro_batch_size (1) x data-parallel ranks "
            "(1024) = 1024; 0.9766 is not whole: use 1024",
            2,
        ),
    ),
    "some other refusal": Made(
        Label("refused", "stop", 0, "n000"), lambda c: c.started(saved=None).fails(0, "model.x must be even", 2)
    ),
    "damaged data": Made(
        Label("data-damaged", "stop", 77, "n009"),
        lambda c: c.started().fails(
            77, "/data/shard-3: block 9 is damaged; set data.on_bad_block to quarantine to train without the block", 2
        ),
    ),
    "a node that did not come": Made(
        Label("nodes-missing", "stop"),
        lambda c: _job(c, "keepstep: 127 of 128 nodes came to the rendezvous at 10.0.0.1:20077 within 280 s"),
    ),
    "a taken port": Made(
        Label("port-taken", "stop"),
        lambda c: _job(c, "keepstep: port 20077 at 10.0.0.1, where node 0 must listen, is taken; choose another"),
    ),
    "an unhealthy node": Made(
        Label("unhealthy-node", "restart", None, "n044"),
        lambda c: _job(c.event("submitted", START - 100, jobs=["77"]), "unhealthy n044: 3 GiB of memory are free"),
    ),
    "an unknown error": Made(
        Label("unknown-error", "restart", 300, "n037"), lambda c: c.started().fails(300, "list index out of range")
    ),
    "an unknown error before any save": Made(
        Label("unknown-error", "stop", 300, "n037"),
        lambda c: c.started(saved=None).fails(300, "list index out of range"),
    ),
    "a straggler": Made(
        Label("straggler", "continue", 999, "n124"),
        lambda c: c.started().train(falling(100)).heartbeats([999]),
        alive=True,
    ),
    "waiting for data": Made(
        Label("data-wait", "continue"), lambda c: c.started().train(falling(100), **WAITS), alive=True
    ),
    "a slow first step": Made(Label("slow-first-step", "continue"), _first_step_slow, alive=True),
    "compiled again": Made(
        Label("compiled-again", "continue"),
        lambda c: c.started().train(falling(100)).event("compiled_again", step=9, why="size mismatch at index 0"),
        alive=True,
    ),
    "NCCL over TCP": Made(
        Label("tcp-between-nodes", "continue"),
        lambda c: c.started().train(falling(100)).log(0, "NCCL uses TCP between the nodes (Socket), which is slower"),
        alive=True,
    ),
    "started again and again": Made(
        Label("starts-without-save", "continue"),
        lambda c: _restarted(c).train(falling(100)),
        alive=True,
    ),
    "a device almost full": Made(
        Label("memory-is-tight", "continue"),
        lambda c: c.started().train(falling(100), device_alloc_retries=7),
        alive=True,
    ),
    "a save failed": Made(
        Label("save-failed", "continue"),
        lambda c: c.started().train(falling(100)).event("save_failed", step=50, error="No space left", in_a_row=1),
        alive=True,
    ),
    "the loss does not fall": Made(
        Label("loss-does-not-fall", "stop"), lambda c: c.started().train(curve(300, lambda _: 10.4)), alive=True
    ),
    "the loss does not fall, and the run finished": Made(
        Label("loss-does-not-fall", "stop"),
        lambda c: c.started().train(curve(300, lambda _: 10.4)).event("finished", step=300),
    ),
    "the loss diverges": Made(
        Label("loss-diverges", "stop"),
        lambda c: c.started().train(curve(300, lambda step: 10 - 6 * min(step, 150) / 150 + max(0, step - 200) / 12)),
        alive=True,
    ),
    "the loss oscillates": Made(
        Label("loss-oscillates", "continue"),
        lambda c: c.started().train(curve(300, lambda step: 6 + 4 * math.exp(-step / 40) + 1.2 * (-1) ** step)),
        alive=True,
    ),
    "the loss spikes": Made(
        Label("loss-spikes", "continue"), lambda c: _spikes(c.started().train(falling(100))), alive=True
    ),
    "healthy and running": Made(
        Label("running", "continue"), lambda c: c.started().train(falling(400)).heartbeats([]), alive=True
    ),
    "healthy and finished": Made(
        Label("finished", "continue"), lambda c: c.started().train(falling(400)).event("finished", step=400)
    ),
    "healthy with noise": Made(
        Label("running", "continue"), lambda c: c.started().train(falling(400, noise=0.25)), alive=True
    ),
    "healthy on a plateau": Made(Label("running", "continue"), lambda c: c.started().train(falling(900)), alive=True),
    "healthy with harmless words": Made(
        Label("finished", "continue"),
        lambda c: _each_rank(
            c.started().train(falling(100)), "checked 8 devices: 0 errors, no failures, memory fine"
        ).event("finished", step=100),
    ),
    "waiting in the queue": Made(
        Label("waiting", "continue"), lambda c: c.event("submitted", START, jobs=["77"]), alive=True
    ),
}
