"""Rules for devices, drivers, networks and processes: what torch, CUDA, NCCL, gloo and the kernel say."""

from functools import partial

from launch.diagnose.rule import Action, Level, Rule

_rule = partial(Rule, section="Machines, devices and processes", level=Level.OUTSIDE, action=Action.RESTART)

RULES = (
    _rule(
        name="device-error",
        external=True,
        shown="`Xid`, `uncorrectable ECC error`, `NVLink` or `fallen off the bus`",
        signs=(
            r"NVRM: Xid \(",
            r"uncorrectable (?:ECC|NVLink) error",
            r"CUDA error: (?:unspecified launch failure|hardware stack error|Invalid access of peer GPU memory)",
            r"has fallen off the bus|GPU is lost",
            r"ncclSystemError.*(?:NVLink|NVLS)|NVLink.*(?:error|down)",
        ),
        cause="a device, or its link, is faulty",
        remedy="exclude the node (`--sbatch --exclude=NODE`), run `keepstep doctor` there, and report it",
    ),
    _rule(
        name="replicas-differ",
        level=Level.FAULT,
        external=True,
        sees=("holds other weights than the ... ranks with replicas of them",),
        signs=(r"rank (?P<rank>\d+) holds other weights than the",),
        cause="memory or processor of that machine is faulty",
        remedy="exclude the machine; the run resumes from a checkpoint before",
    ),
    _rule(
        name="replicas-differ-without-majority",
        names_speaker=False,
        level=Level.FAULT,
        external=True,
        sees=("hold different replicas of the same weights",),
        cause="memory or processor of one of the machines is faulty, and no majority shows which",
        remedy="find it with `keepstep prove --replay RUN --step N`; the run resumes from a checkpoint before",
    ),
    _rule(
        name="driver-or-library-mismatch",
        level=Level.FAULT,
        action=Action.STOP,
        shown="`undefined symbol`, `no kernel image is available` or `driver version is insufficient`",
        signs=(
            r"undefined symbol:",
            r"CUDA driver version is insufficient|driver on your system is too old",
            r"no kernel image is available for execution",
            r"^(?:ImportError|OSError): .*(?:cannot open shared object|version `\S+' not found)",
            r"NCCL version mismatch|Mismatched NCCL version|ncclInvalidUsage.*version",
        ),
        cause="torch, CUDA, NCCL and the driver of the node do not fit each other",
        remedy="`keepstep doctor` on that node names the versions; install the same environment on all nodes",
    ),
    _rule(
        name="module-missing",
        level=Level.FAULT,
        action=Action.STOP,
        shown="`ModuleNotFoundError`",
        signs=(r"ModuleNotFoundError: No module named",),
        cause="a Python package is missing in the environment of the ranks",
        remedy="install it there; check `PYTHON`, `NODE_SETUP` and the container of the site's file",
    ),
    _rule(
        name="device-assert",
        level=Level.FAULT,
        action=Action.STOP,
        shown="`device-side assert triggered`",
        signs=(r"device-side assert triggered",),
        cause="an index was out of range on a device: the data have a token that the model does not know",
        remedy="`keepstep data audit`; repeat with `CUDA_LAUNCH_BLOCKING=1` to see the place",
    ),
    _rule(
        name="device-memory-error",
        level=Level.FAULT,
        shown="`an illegal memory access was encountered`",
        signs=(r"CUDA error: (?:an illegal memory access|misaligned address)",),
        cause="a kernel read or wrote outside of its memory: a faulty device or a bug",
        remedy="if it happens again on the same node, exclude the node; else report it as a bug",
    ),
    _rule(
        name="sigbus",
        level=Level.UNEXPLAINED,
        action=Action.STOP,
        shown="the process ends with SIGBUS",
        signs=(r"^signal SIGBUS",),
        cause="a local data file became shorter while it was mapped, or `/dev/shm` is full",
        remedy="restore the file; free `/dev/shm`",
    ),
    _rule(
        name="crashed",
        level=Level.UNEXPLAINED,
        shown="the process ends with SIGSEGV, SIGFPE or SIGILL",
        signs=(r"^signal SIG(?:SEGV|FPE|ILL)",),
        cause="native code crashed: a faulty node, or a bug of a library",
        remedy="`keepstep doctor` on that node; report it if it happens on other nodes too",
    ),
    _rule(
        name="killed",
        level=Level.UNEXPLAINED,
        shown="a rank ends with SIGKILL",
        signs=(r"^signal SIGKILL",),
        cause="a rank was killed by SIGKILL: by the kernel for memory, or by someone",
        remedy="look at `dmesg` of the node; if its memory ran out, use fewer ranks on it or ask for more memory",
    ),
    _rule(
        name="collective-time-out",
        level=Level.STUCK,
        shown="`Watchdog caught collective operation timeout`, or gloo's `Timed out waiting`",
        signs=(
            r"\[Rank (?P<rank>\d+)\] .*(?:did not|not) (?:join|enter)",
            r"Watchdog caught collective operation timeout",
            r"Timed out waiting \d+ms for (?:recv|send) operation",
            r"Collective WorkNCCL.*timed out",
            r"wait timeout after \d+ms",
        ),
        cause="ranks waited for another one in a collective until its time limit",
        remedy="read `logs/stacks-rank-N.txt` and `logs/collectives-rank-N.json`; keep `train.hang_seconds` below "
        "`parallel.timeout_seconds`, so that the watchdog names the rank first",
    ),
    _rule(
        name="lost-peer",
        level=Level.CONSEQUENCE,
        shown="`Connection closed by peer`, `ncclRemoteError` or `lost the connection to rank 0`",
        signs=(
            r"Connection (?:closed by peer|reset by peer)|connection was reset|Broken pipe",
            r"ncclRemoteError|remote process exited",
            r"lost the connection to rank 0",
            r"rank (?P<rank>\d+) failed; this rank exits",
            r"the connection to node 0 broke",
            r"^signal SIGTERM",
        ),
        cause="a rank lost the connection to another one, which failed first and left no message",
        remedy="look at the other nodes' logs and at the scheduler; the same command resumes the run",
    ),
)
"""Causes before their consequences."""
