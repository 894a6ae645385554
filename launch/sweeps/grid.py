"""The grammar of sweeps: `SECTION.KEY=A,B,C` gives one run for each value, several of them one for each combination.

A comma inside brackets or quotes belongs to its value: `optim.betas=[0.9,0.95],[0.9,0.99]` has two values.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from parallel.errors import LaunchError

CLOSING = {"[": "]", "{": "}"}
MOST_RUNS = 10_000
"""Runs that a sweep may have."""
LONGEST = 40
"""Characters of a value that the name of a run shows."""


@dataclass(frozen=True)
class Combination:
    """One run of a sweep."""

    suffix: str
    """What the run's name adds to that of the recipe: the settings that differ, such as `lr-1e-3-seed-2`."""
    values: Mapping[str, str]
    """The swept settings of this run, by dotted name."""

    @property
    def overrides(self) -> list[str]:
        """The swept settings as overrides."""
        return [f"{key}={value}" for key, value in self.values.items()]


def combinations(settings: Mapping[str, Sequence[str]]) -> list[Combination]:
    """All combinations of the values of each setting; the last setting varies fastest. LaunchError if too many."""
    count = 1
    for values in settings.values():
        count *= len(values)
    if count > MOST_RUNS:
        raise LaunchError(f"the sweep has {count} combinations, and at most {MOST_RUNS} are allowed; give fewer values")
    labels, slugs = _labels(list(settings)), {key: _slugs(values) for key, values in settings.items()}
    found: list[Combination] = []
    for chosen in itertools.product(*(range(len(values)) for values in settings.values())):
        at = dict(zip(settings, chosen, strict=True))
        suffix = "-".join(f"{labels[key]}-{slugs[key][index]}" for key, index in at.items())
        found.append(Combination(suffix, {key: settings[key][index] for key, index in at.items()}))
    return found


def read_settings(texts: Sequence[str], what: str = "") -> dict[str, list[str]]:
    """The values of each setting of `SECTION.KEY=A,B,C` texts. `what`, such as "--sweep", stands before each in errors.

    LaunchError if a text does not read so, if two name the same setting, or if one gives a value twice."""
    settings: dict[str, list[str]] = {}
    for text in texts:
        shown = f"{what} {text[:200]}".strip()
        key, equals, values = text.partition("=")
        if key in settings:
            raise LaunchError(f"two {what or 'settings'} name {key}; give all its values in one: {key}=A,B,C")
        settings[key] = list(_split(values, shown))
        has_spaces = any(character.isspace() for character in text) and (bool(what) or len(settings[key]) > 1)
        if not equals or not key or not values or has_spaces:
            raise LaunchError(f"{shown} must read SECTION.KEY=A,B,C without spaces, such as optim.lr=1e-3,2e-3")
        if twice := next((value for value in settings[key] if settings[key].count(value) > 1), None):
            raise LaunchError(f"{shown} gives the value {twice} twice; give each value once")
    if "name" in settings and len(settings["name"]) > 1:
        raise LaunchError(f"{what} name cannot be swept: each run is named by the settings that differ".strip())
    return settings


def _split(text: str, shown: str) -> Iterator[str]:
    """The values between the commas that are outside of brackets and quotes. LaunchError if one does not end."""
    open_marks: list[str] = []  # what ends each bracket or quote that is open
    begin = 0
    for index, character in enumerate(text):
        if open_marks and character == open_marks[-1]:
            open_marks.pop()
        elif open_marks and open_marks[-1] in "'\"":
            continue
        elif character in CLOSING:
            open_marks.append(CLOSING[character])
        elif character in "'\"" and (begin == index or open_marks):
            open_marks.append(character)
        elif character == "," and not open_marks:
            yield text[begin:index]
            begin = index + 1
    if open_marks:
        raise LaunchError(f"{shown} has no {open_marks[-1]} that ends its last value; add it, or quote the value")
    yield text[begin:]


def _labels(keys: list[str]) -> dict[str, str]:
    """The name of each setting in names of runs: its last part, or all of it if two settings end alike."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: _slug(key if last.count(end) > 1 else end) for key, end in zip(keys, last, strict=True)}


def _slugs(values: Sequence[str]) -> list[str]:
    """The values in names of runs; their numbers from 1 if two would read alike."""
    slugs = [_slug(value) for value in values]
    is_clear = len(set(slugs)) == len(slugs) and all(0 < len(slug) <= LONGEST for slug in slugs)
    return slugs if is_clear else [str(number) for number in range(1, len(values) + 1)]


def _slug(text: str) -> str:
    """The text with the characters that a run's name may have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text.replace("+", "")).strip("-._")
