"""The values that `keepstep submit` hands to Slurm: sbatch options, time limits and counts, checked."""

import re
import shlex
from collections.abc import Sequence

from data_pipeline.config import check_one_line
from parallel.errors import LaunchError

TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
"""Slurm's time limits: minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S, or none."""
OPTION = re.compile(r"-[A-Za-z]|[a-z][a-z0-9-]*")
"""Names of sbatch's options, as `sbatch_options` returns them."""
NEEDS_QUOTES = re.compile(r"[\s'\"\\#]")
"""Characters that sbatch reads as something else in a line that begins with #SBATCH."""


def check_time(name: str, value: str) -> str:
    """Return a time limit in Slurm's format. LaunchError if it does not read so."""
    if not TIME.fullmatch(value):
        raise LaunchError(
            f"{name} ({value}) must be a time limit in Slurm's format: minutes, H:M:S, D-H or D-H:M:S, such as "
            "12:00:00 or 1-12"
        )
    return value


def whole_number(name: str, value: str, least: int) -> int:
    """Return a setting of the site's file as an integer. LaunchError if it is none, or too small."""
    if not value.isdecimal() or int(value) < least:
        raise LaunchError(f"{name} ({value}) in the site's file must be an integer of at least {least}")
    return int(value)


def gpu_count(value: str) -> int:
    """Return the number of GPUs in a value of --gpus-per-node: `8`, `h100:8`, `a100:4,h100:4`. LaunchError if wrong."""
    counts = [re.fullmatch(r"(?:[\w.-]+:)?(\d+)|[A-Za-z][\w.-]*", part) for part in value.split(",")]
    if not all(counts):
        raise LaunchError(f"GPUS_PER_NODE ({value}) must read NUMBER or TYPE:NUMBER, such as 8 or h100:8")
    return sum(int(count[1] or 1) for count in counts if count)


def sbatch_options(words: Sequence[str]) -> dict[str, str | None]:
    """Return sbatch's options by name, with their values; None for an option without a value.

    Reads `--mem=0`, `--mem 0`, `--exclusive`, `-C a100` and `-Ca100`. A short name keeps its dash. LaunchError for a
    word that belongs to no option."""
    found: dict[str, str | None] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            found[name] = value if equals else None
            name = "" if equals else name
        elif re.match("-[A-Za-z]", word):
            name = word[:2]
            found[name] = word[2:] or None
            name = "" if word[2:] else name
        elif name:
            found[name], name = word, ""
        else:
            raise LaunchError(f"{word} belongs to no option of sbatch; write --NAME=VALUE, or -X VALUE")
    return found


def check_text(name: str, value: str) -> str:
    """Return a value. LaunchError if it has line breaks or control characters, which no quotes keep in their place."""
    try:
        return check_one_line(value)
    except ValueError as error:
        raise LaunchError(f"{name}: {error}") from None


def directive(name: str, value: str | None) -> str:
    """Return the #SBATCH line of an option; a value with spaces, quotes or # is quoted.

    LaunchError for a name that no option has, and for a value that cannot be quoted."""
    if not OPTION.fullmatch(name):
        raise LaunchError(f"{name!r} is no name of an sbatch option; write --NAME=VALUE, or -X VALUE")
    check_text(f"the sbatch option {name}", value or "")
    option, separator = (name, " ") if name.startswith("-") else (f"--{name}", "=")
    if value is None:
        return f"#SBATCH {option}"
    return f"#SBATCH {option}{separator}{shlex.quote(value) if NEEDS_QUOTES.search(value) or not value else value}"
