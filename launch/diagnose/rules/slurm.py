"""Rules for Slurm jobs and the health check of nodes."""

from functools import partial

from launch.diagnose.rule import Action, Level, Rule

_rule = partial(Rule, section="Slurm", level=Level.OUTSIDE, action=Action.STOP)
_unhealthy = partial(_rule, level=Level.CONSEQUENCE, action=Action.RESTART, external=True)

RULES = (
    _rule(
        name="no-progress",
        level=Level.MANUAL,
        sees=("failed without progress",),
        cause="the attempt failed before it saved a later step",
        remedy="read the root cause above it; fix it; submit again",
    ),
    _rule(
        name="requeue-limit",
        level=Level.MANUAL,
        sees=("gave up after ... requeues",),
        cause="`--requeue-limit` is reached",
        remedy="find out why attempts fail, then submit again",
    ),
    _unhealthy(
        name="gpu-memory-faulty",
        sees=("uncorrected memory errors",),
        signs=(r"^unhealthy (?P<node>[^:\s]+): .*uncorrected memory errors",),
        cause="a GPU's memory is faulty",
        remedy="report the node; it is excluded",
    ),
    _unhealthy(
        name="slow-links",
        sees=("exchanges with its neighbours run at",),
        signs=(r"^unhealthy (?P<node>[^:\s]+): .*exchanges with its neighbours run at",),
        cause="a node's network is slow",
        remedy="report the node; it is excluded",
    ),
    _unhealthy(
        name="wrong-products",
        sees=("multiplies wrongly",),
        signs=(r"^unhealthy (?P<node>[^:\s]+): .*multiplies wrongly",),
        cause="a device computes wrong results",
        remedy="report the node; it is excluded",
    ),
    _unhealthy(
        name="unhealthy-node",
        sees=("unhealthy ...",),
        signs=(r"^unhealthy (?P<node>[^:\s]+): ",),
        cause="a node failed the check before the start",
        remedy="the message names the problem; the job is requeued without the node",
    ),
    _rule(
        name="no-sbatch",
        level=Level.MANUAL,
        sees=("there is no sbatch on this machine",),
        cause="you are not on a login node",
        remedy="submit from one",
    ),
    _rule(
        name="kill-wait",
        level=Level.MANUAL,
        shown="the job ends without a checkpoint after `scancel`",
        cause="`KillWait` is shorter than a save",
        remedy="raise `KillWait`, or save more often",
    ),
)
"""The documentation keeps this order."""
