"""Rules for what no other rule explains; they decide as the exit code says."""

from functools import partial

from launch.diagnose.rule import Action, Level, Rule

_rule = partial(Rule, section="None of these", level=Level.UNEXPLAINED, action=Action.RESTART)

RULES = (
    _rule(
        name="refused",
        action=Action.STOP,
        level=Level.FAULT,
        shown="one line that begins with `keepstep:`, and exit code 2",
        signs=(r"^exit code 2: ",),
        cause="the recipe, the data, a checkpoint or the command is wrong; the line says what",
        remedy="do what the line says; the same command would fail again",
    ),
    _rule(
        name="unknown-error",
        shown="a traceback",
        signs=(r"^exit code 1: (?!keepstep: )\S", r"^keepstep: rank (?P<rank>\d+) failed:$"),
        cause="a rank failed with an error that no rule knows",
        remedy="read the traceback in the log of that rank; report it as a bug if it is Keepstep's",
    ),
    _rule(
        name="interrupted",
        level=Level.CONSEQUENCE,
        external=True,
        shown="`interrupted`: no event says how the run ended",
        cause="the run was killed from outside, or its node is lost",
        remedy="the same command resumes it; look at the scheduler's log and at `dmesg` of the nodes",
    ),
    _rule(
        name="unknown",
        level=Level.CONSEQUENCE,
        shown="a failure without a message",
        cause="the run failed, and nothing that was found says why",
        remedy="read the logs of the ranks; look at the scheduler's log",
    ),
)
"""Causes before their consequences."""
