"""Settings that were renamed. Recipes, overrides and checkpoints of earlier versions may still use the old names."""

import logging
import os
from collections.abc import Iterable
from typing import Any

from train.errors import ConfigError

log = logging.getLogger(__name__)

OLD_NAMES = {
    "model.rope_base": "model.rope_theta",
    "guard.max_in_a_row": "guard.max_consecutive_bad_steps",
    "guard.max_in_all": "guard.max_bad_steps",
}
"""New dotted name of each renamed setting, by old dotted name."""


def replace_old_names(tree: dict[str, Any]) -> set[str]:
    """Rename old settings within nested sections, in place; return the old names that were found.

    ConfigError if a setting is given under both names."""
    found = {old for old in OLD_NAMES if _holds(tree, old)}
    for old in found:
        new = OLD_NAMES[old]
        if _holds(tree, new):
            raise both_given(old)
        *sections, key = new.split(".")
        section = tree
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = _section(tree, old).pop(old.rpartition(".")[2])
    return found


def both_given(old: str) -> ConfigError:
    """The error for a setting that is given under its old and its new name."""
    return ConfigError(f"{old} is the old name of {OLD_NAMES[old]}, and both are given; remove {old}")


def warn_about(old_names: Iterable[str]) -> None:
    """Log one warning for each old name. Ranks that `keepstep run` started are silent: it has warned already."""
    if "KEEPSTEP_RUN" not in os.environ:
        for old in sorted(old_names):
            log.warning("the setting %s is now called %s; the old name still works", old, OLD_NAMES[old])


def _section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """The section that a setting belongs to; an empty one if it is missing."""
    section: Any = tree
    for part in name.split(".")[:-1]:
        section = section.get(part) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else {}


def _holds(tree: dict[str, Any], name: str) -> bool:
    return name.rpartition(".")[2] in _section(tree, name)
