"""Reads a recipe from YAML and dotted overrides, and writes the resolved recipe.

Every scalar is read as text, both in the file and on the command line, and the declared type of its field decides what
it means. So `1e-4` is a float for a float field, `010` is 10, and `no` is text or False depending on the field. YAML's
own guesses have no effect. Old names of settings are accepted with a warning (`train.old_names`).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from data_pipeline.config import check_one_line
from train.config import Recipe
from train.errors import ConfigError
from train.old_names import OLD_NAMES, both_given, replace_old_names, warn_about
from train.recipe.mistakes import explain
from train.recipe.yaml_text import MAX_VALUES, TooMuchError, parse, read_text
from train.run_length import LENGTHS, drop_lengths, resolve_length

HELPER_PREFIX = "x-"
"""First characters of top-level keys that hold YAML anchors and are no settings."""
RESOLVED = "# The resolved recipe of a run"
"""Begins the recipe that a run writes into its folder. It ends with END, so that a part of it is never read as all."""
END = "...\n"
MAX_DOTS = 8
"""Dots that the name of an override may have."""


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe at `path` with overrides such as `train.steps=200`. ConfigError names each bad setting."""
    return recipe_from(read_tree(Path(path)), overrides)


def recipe_from(tree: dict[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """The recipe with these settings and overrides. Changes the settings. ConfigError names each bad one."""
    old_names = replace_old_names(tree)
    settings = [_split(override) for override in overrides]
    if any(dotted in LENGTHS for dotted, _ in settings):
        drop_lengths(tree)
    for dotted, text in settings:
        if dotted in OLD_NAMES:
            old_names.add(dotted)
            if any(other == OLD_NAMES[dotted] for other, _ in settings):
                raise both_given(dotted)
        _apply(tree, OLD_NAMES.get(dotted, dotted), text)
    warn_about(old_names | replace_old_names(tree))  # an override may set a whole section
    _check_lines(tree)
    resolve_length(tree)
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(error)) from None


def resolved_recipe(recipe: Recipe) -> bytes:
    """The content of the file `recipe.yaml` in a run folder."""
    head = f"{RESOLVED}, as its newest start used it. A start replaces this file.\n"
    return f"{head}{recipe_as_yaml(recipe)}{END}".encode()


def recipe_as_yaml(recipe: Recipe) -> str:
    """The recipe as YAML with all settings, defaults included, in a fixed order."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, width=120)


def read_tree(path: Path) -> dict[str, Any]:
    """The settings of a recipe as nested texts. ConfigError if the file is no recipe, or only a part of one."""
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise ConfigError(f"the recipe {path} does not exist; `ls recipes/` lists the example recipes") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the recipe {path} cannot be read: {error}") from None
    if text.startswith(RESOLVED) and not text.endswith(f"\n{END}"):
        raise ConfigError(
            f"the recipe {path} is cut off: its last line must be {END.strip()!r}; use the recipe that the run was "
            "started with"
        )
    try:
        tree = parse(text)
    except (TooMuchError, RecursionError):
        raise ConfigError(
            f"the recipe {path} has more than {MAX_VALUES} values, or is nested too deeply, once its YAML aliases are "
            "expanded; write it without them"
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"the recipe {path} is not YAML: {' '.join(str(error).split())[:1000]}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"the recipe {path} must contain sections such as `model:` and `train:`, but it does not")
    return {key: value for key, value in tree.items() if not str(key).startswith(HELPER_PREFIX)}


def _check_lines(value: Any, where: str = "") -> None:
    """ConfigError for a text with control characters: names and paths become lines of job scripts and of logs."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_lines(str(key), "the name of a setting")
            _check_lines(inner, f"{where}.{key}".removeprefix("."))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _check_lines(inner, f"{where}.{number}")
    elif isinstance(value, str):
        try:
            check_one_line(value)
        except ValueError as error:
            raise ConfigError(f"{where[:200]}: {error}") from None


def _split(override: str) -> tuple[str, str]:
    """Dotted name and value of an override."""
    dotted, equals, text = override.removeprefix("--").partition("=")
    if not equals or not dotted:
        raise ConfigError(
            f"the override {override[:200]!r} must have the form SECTION.KEY=VALUE, such as train.steps=200"
        )
    if dotted.count(".") > MAX_DOTS:
        raise ConfigError(f"the override {dotted[:200]!r} is no name of a setting, which has {MAX_DOTS} dots at most")
    return dotted, text


def _apply(tree: dict[str, Any], dotted: str, text: str) -> None:
    """Set a name such as `a.b.0.c` in the tree, and create missing sections."""
    *parents, last = dotted.split(".")
    node: Any = tree
    for key in parents:
        node = _child(node, key, dotted)
    value = _override_value(text)
    if isinstance(node, list):
        node[_index(node, last, dotted)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise ConfigError(f"the override {dotted} names a setting inside {parents[-1]}, which is not a section")


def _override_value(text: str) -> Any:
    """The value of an override: YAML if it begins like a list, a mapping or a quoted text, else the text itself."""
    text = text.strip()
    if text in ("null", "Null", "NULL", "~"):
        return None
    if text[:1] not in ("[", "{", "'", '"'):
        return text
    try:
        return parse(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def _child(node: Any, key: str, dotted: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, key, dotted)]
    if not isinstance(node, dict):
        raise ConfigError(f"the override {dotted} names a setting inside a value that is not a section, at {key}")
    if node.get(key) is None:
        node[key] = {}
    return node[key]


def _index(node: list[Any], key: str, dotted: str) -> int:
    if not key.isdecimal() or int(key) >= len(node):
        raise ConfigError(f"the override {dotted} needs a number below {len(node)} in place of {key!r}")
    return int(key)


def recipe_schema() -> str:
    """JSON schema of recipes, for completion and checks in editors."""
    return json.dumps(Recipe.model_json_schema(), indent=2)
