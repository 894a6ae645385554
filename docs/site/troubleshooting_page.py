"""Generates docs/troubleshooting.md from the rules of `keepstep diagnose`.

python docs/site/troubleshooting_page.py      # writes the page; a test compares it with the rules
"""

from collections.abc import Iterator
from pathlib import Path

from launch.diagnose.rule import Level, Rule
from launch.diagnose.rules.table import RULES
from tables import table

PAGE = Path(__file__).parents[1] / "troubleshooting.md"
HEAD = """\
# Troubleshooting

`keepstep diagnose RUN` reads what a run left behind and says what happened first, on which rank and node, and what to
do. This page lists its rules, so it also answers a message that you see elsewhere. `...` stands for values. The
[rules](../launch/diagnose/rules/table.py) are data; `docs/site/troubleshooting_page.py` makes this page from them.

The column "then" is the verdict. **restart**: the same command may succeed. A restart also needs progress: if the
attempt saved nothing, the verdict is stop, unless the cause lies outside of the run. **stop**: the same command would
fail again. **continue**: nothing needs to end or to start.

Exit code 1 means that another attempt may succeed; 2 and 3 mean that the same command will fail again (3: the memory of
a device is too small); 75 means that the run stopped on request. [Exit codes](reference/exit-codes.md) has the details.
"""
SECTIONS = {
    "The run does not start": "",
    "Ranks do not find each other": "",
    "Preparing data": "",
    "While the run trains": "",
    "The loss goes wrong": "These rules judge the losses in `metrics.jsonl` after the warm-up. The verdict also names "
    "what is unusual in the recipe: the learning rate for that size of model, the warm-up, the clipping and the "
    "precision. It gives the data step of the newest bad batch.",
    "The run is slow": "",
    "Machines, devices and processes": "",
    "How a run ended": "",
    "Slurm": "",
    "Import, export, generate": "",
    "None of these": "",
}
"""Heading -> introduction, in the order of the page."""
AFTER = {
    "Slurm": "`keepstep doctor --cluster` checks Slurm's settings before the first run.",
    "None of these": """\
1. `keepstep status RUN` and the last lines of `RUN/events.jsonl`.
2. `RUN/logs/HOST/rank-N.log` of the rank that failed first.
3. `keepstep doctor` on the machine.
4. `keepstep checkpoint verify RUN`.

A traceback is a bug of Keepstep. Please report it with the command, the recipe and the log of that rank.""",
}
"""Heading -> text after its table."""


def page() -> str:
    """Returns the page as Markdown."""
    return "\n".join([HEAD, *(_section(heading) for heading in SECTIONS)])


def _section(heading: str) -> str:
    rules = [rule for rule in RULES if rule.section == heading]
    rows = [row for rule in rules for row in _rows(rule)]
    parts = [f"## {heading}", SECTIONS[heading], table(("you see", "cause", "what to do", "then"), rows).rstrip()]
    return "\n\n".join(part for part in [*parts, AFTER.get(heading, "")] if part) + "\n"


def _rows(rule: Rule) -> Iterator[tuple[str, str, str, str]]:
    verdict = "" if rule.level is Level.MANUAL else rule.action.value
    seen = [*(f"`{message}`" for message in rule.sees), *([rule.shown] if rule.shown else [])]
    yield seen[0], rule.cause, rule.remedy, verdict
    for message in seen[1:]:
        yield message, "the same", "the same", verdict


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
