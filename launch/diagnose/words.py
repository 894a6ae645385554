"""A verdict in words, for the terminal, the log of a job and the decision to requeue it."""

from launch.diagnose.rule import Level
from launch.diagnose.verdict import BAD_ENDS, Diagnosis
from launch.terminal import local_time


def cause_lines(found: Diagnosis) -> list[str]:
    """Return the first cause with its place and moment, and what shows it."""
    name = "root cause" if found.state in BAD_ENDS else "diagnosis"
    when = f" at {local_time(found.time)}" if found.time else ""
    shown = [line for text in found.evidence for line in text.splitlines()]
    return [f"{name}: {_placed(found)}{when}", *(f"  | {line}" for line in shown)]


def facts(found: Diagnosis) -> list[tuple[str, str]]:
    """Return the verdict and the advice as names and values."""
    verdict = f"{found.action} ({found.why})" if found.why else found.action
    shown = [("verdict", verdict), ("what to do", _plain(found.remedy))]
    shown += [("", _plain(hint)) for hint in found.hints]
    shown += [("also", f"{one['rule']}: {one['text'].partition(chr(10))[0]}") for one in found.also]
    return [*shown, ("more", f"{found.documentation} (rule {found.rule})")]


def in_one_line(found: Diagnosis) -> str:
    """Return cause, verdict and advice as one line."""
    return f"{_placed(found)}; {found.action}: {found.why}; {_plain(found.remedy)}"


def is_explained(found: Diagnosis) -> bool:
    """Return whether a rule names a cause of its own, so that it may change the decision of the exit code."""
    return found.state in BAD_ENDS and found.level <= Level.UNEXPLAINED and found.rule != "unknown-error"


def _placed(found: Diagnosis) -> str:
    place = _where(found)
    return f"{place}: {_plain(found.cause)}" if place else _plain(found.cause)


def _where(found: Diagnosis) -> str:
    """Return the faulty rank and node, as far as known, such as `rank 1 on n2 (and 3 other ranks)`."""
    if found.rank is None:
        return f"node {found.node}" if found.node else ""
    place = f"rank {found.rank} on {found.node}" if found.node else f"rank {found.rank}"
    return f"{place} (and {found.ranks - 1} other ranks)" if found.ranks > 1 else place


def _plain(text: str) -> str:
    """Return Markdown without the marks of code."""
    return text.replace("`", "")
