"""Rules for runs that something outside of them ended, and for those that ended on their own."""

from functools import partial

from launch.diagnose.rule import Action, Level, Rule

_rule = partial(Rule, section="How a run ended", level=Level.OUTSIDE, action=Action.RESTART)
_state = partial(_rule, level=Level.STATE)

RULES = (
    _rule(
        name="cancelled",
        action=Action.STOP,
        shown="`CANCELLED AT ...` in the job's log, without a reason after it",
        signs=(r"(?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+(?: \*\*\*)?$",),
        cause="someone cancelled the job (`scancel`)",
        remedy="submit again to resume",
    ),
    _rule(
        name="stop-requested",
        action=Action.STOP,
        shown="`stopped at step ... (STOP file)`",
        signs=(r"^event stop_requested:", r"^event stopped: STOP file"),
        cause="`keepstep stop` asked the run to save and stop",
        remedy="nothing; the same command resumes the run",
    ),
    _rule(
        name="interrupted-by-user",
        action=Action.STOP,
        shown="`stopped at step ... (SIGINT)`",
        signs=(r"^event stopped: SIGINT",),
        cause="someone stopped the run at its terminal (Ctrl-C)",
        remedy="nothing; the same command resumes the run",
    ),
    _rule(
        name="preempted",
        external=True,
        shown="`DUE TO PREEMPTION` in the job's log",
        signs=(r"CANCELLED AT \S+ DUE TO PREEMPTION", r"slurmstepd: .*[Pp]reempt"),
        cause="the scheduler took the nodes for another job",
        remedy="nothing: the job is requeued and resumes",
    ),
    _rule(
        name="time-limit",
        external=True,
        shown="`DUE TO TIME LIMIT` in the job's log, or `stopped at step ... (SIGUSR2)`",
        signs=(r"CANCELLED AT \S+ DUE TO TIME LIMIT", r"^event stopped: SIGUSR2"),
        cause="the time limit of the job was near or reached",
        remedy="nothing: the job is requeued and resumes; if nothing was saved, ask for more time or save more often",
    ),
    _rule(
        name="terminated",
        external=True,
        shown="`stopped at step ... (SIGTERM)`",
        signs=(r"^event stopped: SIG(?:TERM|USR1|HUP)", r"^event stopped: another rank was asked to stop"),
        cause="a signal asked the run to save and stop: a preemption, a lost terminal, or someone's `kill`",
        remedy="the same command resumes the run",
    ),
    _rule(
        name="stop-took-too-long",
        external=True,
        sees=("the ranks did not stop within",),
        cause="the ranks were asked to stop, did not do so in time, and were killed",
        remedy="allow more time (`--stop-seconds`, or `WARN_SECONDS` of the site's file), or save more often",
    ),
    _rule(
        name="kernel-out-of-memory",
        shown="`oom_kill` in the job's log, or `the kernel has killed processes for memory`",
        signs=(
            r"oom[-_]kill",
            r"Out of memory: Killed process",
            r"^signal SIGKILL, after the kernel killed processes for memory",
            r"srun: error: (?P<node>\S+): tasks? \S+: Out Of Memory",
        ),
        cause="the memory of the node ran out, and the kernel killed a process",
        remedy="lower `data.prefetch_batches`, use fewer ranks on a node, or ask for more memory (`--mem`)",
    ),
    _rule(
        name="lost-node",
        external=True,
        shown="`NODE FAIL` in the job's log, or `node ... has not answered`",
        signs=(
            r"DUE TO NODE FAILURE",
            r"node \d+ \((?P<node>[^)]*)\) has not answered",  # also the event lost_node
            r"error: Node failure on (?P<node>\S+)",
            r"srun: error: .*(?:[Ll]aunch failed|Communication connection failure)",
        ),
        cause="a node, or its network, failed",
        remedy="nothing: the run resumes on other nodes; report the node if it happens again",
    ),
    _state(
        name="finished",
        action=Action.CONTINUE,
        shown="`finished`",
        signs=(r"^event finished:",),
        cause="the run finished its last step and saved it",
        remedy="nothing; to train longer, raise `train.steps` and add `--allow schedule`",
    ),
    _state(
        name="running",
        action=Action.CONTINUE,
        shown="`running`, and nothing wrong",
        cause="the run goes on, and nothing is wrong",
        remedy="nothing",
    ),
    _state(
        name="silent",
        action=Action.CONTINUE,
        shown="`silent`: nothing was written for minutes",
        cause="the run has written nothing for minutes, and no event says that it ended",
        remedy="`keepstep status RUN` shows where its ranks are; the watchdog ends a hang after `train.hang_seconds`",
    ),
    _state(
        name="waiting",
        action=Action.CONTINUE,
        shown="`pending` or `new`",
        cause="the run has not started yet",
        remedy="wait, or look at the queue: `squeue`",
    ),
)
"""Causes before their consequences; what a person wanted comes first."""
