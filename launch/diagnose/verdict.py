"""Applies the rules to the evidence of a run: first cause, faulty rank and node, what to do.

A finding is a rule with the line that shows it. Nearer levels win (`rule.Level`). Among ranks that failed, the first
one in time wins: the others followed. A verdict is "restart" only if another attempt may end otherwise.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from launch.diagnose.evidence import Evidence, Line
from launch.diagnose.rule import Action, Level, Rule
from launch.diagnose.rules.table import BY_NAME, RULES

BAD_ENDS = ("failed", "interrupted")
NOT_STARTED = ("new", "pending")
SHOWN_LINES = 12
"""Last lines of a failed rank's log that are shown where no rule explains them."""
SHOWN_CHARACTERS = 600
"""Characters of a line that are shown."""
DOCUMENTED = "docs/troubleshooting.md"
_SPEAKERS = (Level.OUTSIDE, Level.FAULT, Level.UNEXPLAINED)
"""Levels at which the rank that says something is the faulty one."""
_FOR_GOOD = re.compile(r"^exit code [23]: ")
_ORDER = {rule.name: number for number, rule in enumerate(RULES)}


@dataclass(frozen=True)
class Finding:
    """A rule that applies, and what shows it."""

    rule: Rule
    text: str
    time: float
    rank: int | None
    """The faulty rank, if it is known."""
    node: str
    speaker: int | None = None
    """The rank that says it."""
    ranks: int = 0
    """Ranks that show the same."""


@dataclass(frozen=True)
class Diagnosis:
    """The fields of `keepstep diagnose --json`."""

    state: str
    rule: str
    """Name of the rule; `unknown` if none explains the failure."""
    cause: str
    rank: int | None
    node: str
    ranks: int
    """Ranks that show the same fault."""
    time: float
    """Seconds since 1970; 0 if unknown."""
    action: str
    """`restart`, `stop` or `continue`."""
    why: str
    """Reason of the action."""
    remedy: str
    hints: list[str]
    evidence: list[str]
    """What shows the cause, word by word."""
    documentation: str
    also: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    """Other findings of the same start: rule and text."""

    @property
    def level(self) -> Level:
        """How near to the first cause the finding is."""
        return BY_NAME[self.rule].level


def diagnose(evidence: Evidence, progress: bool | None = None) -> Diagnosis:
    """Return the verdict. `progress`: whether the attempt saved a later step, if the caller knows better."""
    findings = find(evidence)
    if evidence.state in NOT_STARTED and any(one.rule.level <= Level.CONSEQUENCE for one in findings):
        evidence = replace(evidence, state="failed")  # before its first event
    first = choose(evidence.state, findings)
    if (
        first.rule.level is Level.FAULT and 2 * first.ranks > evidence.world_size
    ):  # most ranks say it: the lowest stands
        same = [one for one in findings if one.rule is first.rule and one.rank is not None]
        first = min(same, key=lambda one: one.rank or 0)
    made_progress = evidence.progress if progress is None else progress
    action, why = decide(first.rule, evidence, made_progress)
    shown = [first.text[:SHOWN_CHARACTERS]] if first.text and first.rule.level is not Level.STATE else []
    if first.rule.level is Level.UNEXPLAINED and first.rank is not None:
        shown = _last_lines(evidence.lines, first.rank) or shown
    others = [finding for finding in findings if _is_worth_a_line(finding, first)]
    names = dict.fromkeys(finding.rule.name for finding in others)
    return Diagnosis(
        state=evidence.state,
        rule=first.rule.name,
        cause=first.rule.cause,
        rank=first.rank,
        node=first.node,
        ranks=first.ranks,
        time=first.time,
        action=action.value,
        why=why,
        remedy=first.rule.remedy,
        hints=first.rule.hints(evidence) if first.rule.hints else [],
        evidence=shown,
        documentation=f"{DOCUMENTED}: {first.rule.section}",
        also=[
            {"rule": name, "text": next(one.text for one in others if one.rule.name == name)[:SHOWN_CHARACTERS]}
            for name in names
        ],
    )


def find(evidence: Evidence) -> list[Finding]:
    """Return all findings: one for each rule and rank, at the moment of the first line that shows it."""
    rules = [rule for rule in RULES if rule.level is not Level.MANUAL and (rule.when is None or rule.when(evidence))]
    first: dict[tuple[str, int | None, int | None], Finding] = {}
    for finding in _matches(rules, evidence):
        key = finding.rule.name, finding.rank, finding.speaker
        if key not in first or finding.time < first[key].time:
            first[key] = finding
    ranks = Counter(rule for rule, rank in {(rule, rank) for rule, rank, _ in first} if rank is not None)
    found = [replace(one, ranks=ranks[one.rule.name]) for one in first.values()]
    return sorted(_without_victims(found), key=lambda one: (_ORDER[one.rule.name], one.rank is None, one.time))


def _matches(rules: Sequence[Rule], evidence: Evidence) -> Iterator[Finding]:
    of_any_line = [rule for rule in rules if not rule.needs_end]
    cache: dict[tuple[str, bool], list[tuple[Rule, dict[str, str | None]]]] = {}
    for line in evidence.lines:
        key = line.text, line.is_error
        if key not in cache:
            candidates = rules if line.ends_process else of_any_line
            cache[key] = [(rule, match.groupdict()) for rule in candidates if (match := rule.match(line))]
        for rule, named in cache[key]:
            yield _finding(rule, line, named, evidence)
    for rule in rules:
        if rule.test is not None and (line := rule.test(evidence)) is not None:
            yield _finding(rule, line, {}, evidence)


def _finding(rule: Rule, line: Line, named: dict[str, str | None], evidence: Evidence) -> Finding:
    is_speaker = rule.level in _SPEAKERS or rule.test is not None or line.text.startswith("event ")
    is_speaker = is_speaker and rule.names_speaker
    named_rank = named.get("rank")
    rank = int(named_rank) if named_rank else line.rank if is_speaker else None
    host = evidence.hosts.get(rank, "") if rank is not None else ""
    node = named.get("node") or (line.node if is_speaker and rank == line.rank else "") or host
    return Finding(rule, line.text, line.time, rank, node, line.rank)


def _without_victims(findings: list[Finding]) -> list[Finding]:
    """Leave out the tracebacks of ranks that only lost a peer."""
    lost = BY_NAME["lost-peer"]
    victims = {one.speaker for one in findings if one.rule is lost}

    def is_of_victim(one: Finding) -> bool:
        says_no_more = not one.text.startswith("exit code ") or lost.match(Line(one.text, one.time)) is not None
        return one.speaker in victims and says_no_more

    return [one for one in findings if one.rule.name != "unknown-error" or not is_of_victim(one)]


def choose(state: str, findings: Sequence[Finding]) -> Finding:
    """Return the finding that is the first cause, or that describes the run best if nothing failed."""
    if state in BAD_ENDS:
        causes = [one for one in findings if one.rule.level <= Level.CONSEQUENCE]
        nearest = min((one.rule.level for one in causes), default=Level.CONSEQUENCE)
        if nearest is Level.CONSEQUENCE and state == "interrupted":
            return _of("interrupted")
        return _earliest([one for one in causes if one.rule.level is nearest]) or _of("unknown")
    if state == "stopped":
        outside = [one for one in findings if one.rule.level is Level.OUTSIDE]
        return _earliest(outside) or _of("terminated")
    sick = [one for one in findings if one.rule.level is Level.SICK]
    if state in ("running", "silent") and not sick:
        sick = [one for one in findings if one.rule.level is Level.WARNING]
    if sick:
        return sick[0]
    known = state if state in ("finished", "silent", "running") else "waiting"
    return next((one for one in findings if one.rule.name == known), _of(known))


def _earliest(findings: Sequence[Finding]) -> Finding | None:
    """Return the first cause among findings of one level, which are in the order of rules.

    Of each rank the first rule counts, and then the rank that failed first. Elsewhere the first rule counts."""
    if not findings or findings[0].rule.level not in (Level.FAULT, Level.UNEXPLAINED):
        return findings[0] if findings else None
    of_rank: dict[int | None, Finding] = {}
    for one in findings:
        of_rank.setdefault(one.speaker, one)
    return min(of_rank.values(), key=lambda one: (one.speaker is None, one.time, _ORDER[one.rule.name]))


def _of(name: str) -> Finding:
    return Finding(BY_NAME[name], "", 0.0, None, "")


def decide(rule: Rule, evidence: Evidence, progress: bool) -> tuple[Action, str]:
    """Return what to do and the reason. Without progress, another attempt is right only if the cause lay outside."""
    if rule.action is Action.CONTINUE:
        return rule.action, ""
    if rule.action is Action.STOP:
        reasons = {Level.OUTSIDE: "a person wanted it to end", Level.SICK: "to train on like this is a waste"}
        return rule.action, reasons.get(rule.level, "the same command would fail again")
    if any(line.is_error and _FOR_GOOD.match(line.text) for line in evidence.lines):
        return Action.STOP, "a rank failed for good (exit code 2 or 3)"
    if evidence.state not in BAD_ENDS or progress:
        return Action.RESTART, "the same command resumes the run"
    if rule.external and evidence.starts_without_save <= 1:
        return Action.RESTART, "the cause lies outside the run"
    return Action.STOP, "nothing was saved since the start, so another attempt would fail the same way"


def _is_worth_a_line(finding: Finding, first: Finding) -> bool:
    """Return whether a finding says more than the first cause does."""
    says_no_more = finding.rule.level in (Level.STUCK, Level.UNEXPLAINED, Level.CONSEQUENCE, Level.STATE)
    is_the_same = finding.rule.name == first.rule.name or finding.text == first.text
    return not says_no_more and not is_the_same and finding.rule.name != "refused"


def _last_lines(lines: Iterable[Line], rank: int) -> list[str]:
    said = [line.text for line in lines if line.rank == rank and not line.text.startswith(("event ", "exit code "))]
    return [text[:SHOWN_CHARACTERS] for text in said[-SHOWN_LINES:]]
