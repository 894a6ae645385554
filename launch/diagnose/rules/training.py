"""Rules for what happens while a run trains: numbers that go wrong, memory, disks, hangs and slow ranks."""

from functools import partial

from launch.diagnose import losses, pace
from launch.diagnose.rule import Action, Level, Rule
from launch.diagnose.space import is_full_now

_rule = partial(Rule, section="While the run trains", level=Level.FAULT, action=Action.STOP)
_warning = partial(_rule, level=Level.WARNING, action=Action.CONTINUE)
_FULL = (
    r"^exit code \d+: (?:.*?\brank (?P<rank>\d+): )?.*(?:No space left on device|Disk quota exceeded|no space is left)",
)

RULES = (
    _rule(
        name="dead-model",
        names_speaker=False,
        sees=("the model is dead",),
        cause="several gradients in a row were zero: an earlier divergence destroyed the weights",
        remedy="run the two commands in the message; a lower `optim.lr` alone repairs nothing",
        hints=losses.hints,
    ),
    _rule(
        name="not-finite",
        names_speaker=False,
        shown="`the run has diverged: ... must be finite`",
        signs=(r"the run has diverged: [^;]* must be finite",),
        cause="loss or gradient norm was NaN or infinite in too many steps",
        remedy="run the two commands in the message: they continue from the last good checkpoint in a new run; look at "
        "the documents of that step",
        hints=losses.hints,
    ),
    _rule(
        name="diverged",
        names_speaker=False,
        sees=("the run has diverged",),
        cause="too many bad steps",
        remedy="run the two commands in the message: they continue from the last good checkpoint in a new run; look at "
        "the documents of that step",
        hints=losses.hints,
    ),
    _rule(
        name="weights-not-finite",
        sees=("has values that are not finite; the checkpoint was not saved",),
        action=Action.RESTART,
        cause="weights have become NaN or infinite",
        remedy="the run resumes from the checkpoint before; lower `optim.lr`",
        hints=losses.hints,
    ),
    _rule(
        name="device-memory",
        shown="`memory ran out (CUDA out of memory ...)` and exit code 3",
        signs=(r"^exit code 3: ",),
        cause="the memory of a device ran out before the attempt finished a step",
        remedy="lower `train.micro_batch_size`; `parallel.activation_checkpointing: selective`; a sharded engine",
    ),
    _rule(
        name="device-memory-later",
        action=Action.RESTART,
        shown="`memory ran out (CUDA out of memory ...)` and exit code 1",
        signs=(r"(?:CUDA|HIP|XPU) out of memory|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED",),
        cause="the memory of a device ran out after some steps: it is nearly full, or it fragments",
        remedy="lower `train.micro_batch_size`, or set `parallel.activation_checkpointing: selective`",
    ),
    _rule(
        name="memory",
        action=Action.RESTART,
        sees=("memory ran out",),
        signs=(r"DefaultCPUAllocator: can't allocate memory", r"std::bad_alloc", r"^MemoryError"),
        cause="the memory of the node ran out: the micro batch or the model is too large, or other processes fill it",
        remedy="lower `train.micro_batch_size` or `data.prefetch_batches`; a sharded engine; fewer ranks on a node",
    ),
    _rule(
        name="read-only-disk",
        shown="`Read-only file system` or `Permission denied`",
        signs=(
            r"exit code \d+: .*cannot be written \(",
            r"exit code \d+: .*(?:Read-only file system|Permission denied)",
            r"^(?:\[\d+\] )?keepstep: (?!the failure).*(?:Read-only file system|Permission denied)",
        ),
        cause="the run folder, or the disk below it, cannot be written",
        remedy="make it writable, or set `runs_dir` to another folder; then the same command resumes",
    ),
    _rule(
        name="disk-full",
        sees=("no space is left for",),
        signs=_FULL,
        when=is_full_now,
        cause="the disk is full",
        remedy="free space, lower `checkpoint.keep_last`, or another `runs_dir`",
    ),
    _rule(
        name="disk-was-full",
        action=Action.RESTART,
        shown="`No space left on device`, and there is room again",
        signs=_FULL,
        cause="the disk was full; it has room for a checkpoint now",
        remedy="nothing now; lower `checkpoint.keep_last` so that it does not fill again",
    ),
    _rule(
        name="saves-failed",
        action=Action.RESTART,
        signs=(r"saves in a row failed.*?\brank (?P<rank>\d+): ",),
        sees=("saves in a row failed", "the last checkpoint (step ...) could not be saved"),
        cause="the disk is full, read-only or broken",
        remedy="fix the disk; the same command resumes",
    ),
    _rule(
        name="data-damaged",
        sees=("set data.on_bad_block to quarantine to train without the block",),
        cause="a block of data is damaged or unreadable",
        remedy="restore the file, add a `mirror`, or quarantine the block",
    ),
    _rule(
        name="hang-in-collective",
        level=Level.STUCK,
        action=Action.RESTART,
        sees=("did not join",),
        signs=(r"^event hang: .*ranks? (?P<rank>\d+)(?:, \d+)* did not join",),
        cause="the named rank has not entered the collective in which the others wait",
        remedy="its stack in `logs/stacks-rank-N.txt`; its node",
    ),
    _rule(
        name="stopped-process",
        level=Level.STUCK,
        action=Action.RESTART,
        sees=("sends no heartbeats: its process is stopped or its node is down", "stopped or unreachable"),
        signs=(r"rank (?P<rank>\d+) (?:\(process \d+ on (?P<node>\S+)\) )?(?:sends no heartbeats|has not answered)",),
        cause="a process is stopped, its node is down, or its network is cut",
        remedy="look at that node; `keepstep doctor` there",
    ),
    _rule(
        name="hang",
        level=Level.STUCK,
        action=Action.RESTART,
        sees=("all ranks exit",),
        signs=(r"^event hang:",),
        cause="a hang: no rank made progress for `train.hang_seconds`",
        remedy="read the stack of the named rank, and `logs/stacks-rank-N.txt`; if a compile or save is slow, raise "
        "`train.hang_seconds`",
    ),
    _warning(
        name="straggler",
        sees=("is a straggler: its probe took",),
        signs=(r"^event slow_rank:",),
        test=pace.straggler,
        cause="the rank's processor is slow or shared",
        remedy="check temperature, other work and clocks of that node; exclude it",
    ),
    _warning(
        name="save-failed",
        shown="`the checkpoint of step ... failed`",
        signs=(r"^event save_failed:",),
        cause="a save failed, and the run goes on with its earlier checkpoints",
        remedy="look at the disk before `checkpoint.max_failures` saves in a row fail",
    ),
    _warning(
        name="checkpoint-quarantined",
        sees=("is damaged and is now quarantined at",),
        signs=(r"^event quarantined:",),
        cause="a checkpoint was damaged, and the one before it was used",
        remedy="look at the disk; `keepstep checkpoint verify RUN` checks the others",
    ),
    _warning(
        name="blocks-quarantined",
        shown="`blocks_quarantined` among the events",
        signs=(r"^event blocks_quarantined:",),
        cause="the run trains without damaged blocks of its data",
        remedy="restore the files; `keepstep data audit RUN` lists what was trained on",
    ),
    _warning(
        name="batch-skipped",
        sees=("is skipped:",),
        signs=(r"^event (?:skipped|spike|rolled_back):",),
        cause="loss or gradient norm was not finite or spiked",
        remedy="if rare, nothing; look at the documents: `keepstep data trace RUN --data-step N`",
        hints=losses.documents,
    ),
    _warning(
        name="compiled-again",
        sees=("graphs were compiled again",),
        signs=(r"^event compiled_again:",),
        cause="a shape or setting changed in a later step",
        remedy="see the cause in the message; set `parallel.compile: false` if it repeats",
    ),
    _warning(
        name="tcp-between-nodes",
        sees=("NCCL uses TCP between the nodes",),
        cause="NCCL found no RDMA network",
        remedy="the message lists what to check",
    ),
    _warning(
        name="damaged-log-lines",
        level=Level.MANUAL,
        sees=("lines that are no records were skipped",),
        cause="a log has damaged lines",
        remedy="nothing: the run does not need them",
    ),
)
"""Causes before their consequences."""
