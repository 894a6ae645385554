"""Reads a recipe from YAML and dotted overrides, and writes the resolved recipe.

Every scalar is read as text, both in the file and on the command line, and the declared type of its field decides what
it means. So `1e-4` is a float for a float field, `010` is 10, and `no` is text or False depending on the field. YAML's
own guesses have no effect. Old names of settings are accepted with a warning (`train.old_names`).
"""

import difflib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from train.config import Recipe
from train.errors import ConfigError
from train.old_names import OLD_NAMES, both_given, replace_old_names, warn_about
from train.run_length import LENGTHS, drop_lengths, resolve_length

NAMES_ELSEWHERE = {
    "learning_rate": "optim.lr",
    "max_steps": "train.steps",
    "num_epochs": "train.epochs",
    "max_tokens": "train.tokens",
    "batch_size": "train.global_batch_size",
    "gradient_accumulation_steps": "train.micro_batch_size",
    "block_size": "model.seq_len",
    "hidden_size": "model.d_model",
    "num_hidden_layers": "model.n_layers",
    "num_attention_heads": "model.n_heads",
    "grad_clip": "optim.max_grad_norm",
    "save_steps": "checkpoint.every",
    "output_dir": "runs_dir",
}
"""Our name of each setting, by its name in other training systems."""


MAX_VALUES = 100_000
"""Values that a recipe may have after its YAML aliases are expanded."""
HELPER_PREFIX = "x-"
"""First characters of top-level keys that hold YAML anchors and are no settings."""
_KEPT_TAGS = ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")


class _TextLoader(yaml.SafeLoader):
    """Loads YAML whose scalars stay text, except null and the merge key `<<`. Repeated keys are errors."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node. ConstructorError if a key is repeated."""
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


_TextLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag in _KEPT_TAGS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe at `path` with overrides such as `train.steps=200`. ConfigError names each bad setting."""
    tree = _read_tree(Path(path))
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
    resolve_length(tree)
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def recipe_as_yaml(recipe: Recipe) -> str:
    """The recipe as YAML with all settings, defaults included, in a fixed order."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, width=120)


def _read_tree(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"the recipe {path} does not exist; `ls recipes/` lists the example recipes") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the recipe {path} cannot be read: {error}") from None
    try:
        tree = _parse(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"the recipe {path} is not YAML: {' '.join(str(error).split())}") from None
    except (OverflowError, RecursionError):
        raise ConfigError(
            f"the recipe {path} has more than {MAX_VALUES} values, or is nested too deeply, once its YAML aliases are "
            "expanded; write it without them"
        ) from None
    if not isinstance(tree, dict):
        raise ConfigError(f"the recipe {path} must contain sections such as `model:` and `train:`, but it does not")
    return {key: value for key, value in tree.items() if not str(key).startswith(HELPER_PREFIX)}


def _parse(text: str) -> Any:
    """The value of a YAML text, no part of which occurs twice in memory. OverflowError if aliases make it too large."""
    loader = _TextLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _expanded_size(node, {}) > MAX_VALUES:
            raise OverflowError
        return _unshared(loader.construct_document(node))
    finally:
        loader.dispose()


def _expanded_size(node: yaml.Node, known: dict[int, float]) -> float:
    """Number of nodes below and including this one, aliases expanded; infinite if it contains itself."""
    if id(node) not in known:
        known[id(node)] = float("inf")  # what a node inside itself finds
        children: list[Any] = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
        known[id(node)] = 1 + sum(_expanded_size(part, known) for part in parts)
    return known[id(node)]


def _unshared(value: Any) -> Any:
    """A copy in which the value of an alias is separate from that of its anchor, so that overrides change one."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


def _split(override: str) -> tuple[str, str]:
    """Dotted name and value of an override."""
    dotted, equals, text = override.removeprefix("--").partition("=")
    if not equals or not dotted:
        raise ConfigError(f"the override {override!r} must have the form SECTION.KEY=VALUE, such as train.steps=200")
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
        return _parse(text)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError):
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


def _explain(error: ValidationError) -> str:
    """All errors as one line, the innermost of each setting alone."""
    items = error.errors(include_url=False)
    inner = {item["loc"][:depth] for item in items for depth in range(1, len(item["loc"]))}
    return "; ".join(_explain_one(item) for item in items if item["loc"] not in inner)


def _explain_one(item: Any) -> str:
    where = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        section, _, key = where.rpartition(".")
        return f"unknown setting {where}{_suggest(section, key)}"
    if item["type"] == "missing":
        return f"the setting {where} is missing"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return f"{where}: {message}" if where else message
    return f"{where} ({item['input']!r}): {message[0].lower()}{message[1:]}"


def _suggest(section: str, key: str) -> str:
    """A hint: the most similar name in the section, the same name in another section, or all names of the section."""
    names = list(_setting_names(Recipe))
    section = ".".join(part for part in section.split(".") if not part.isdigit())
    key, prefix = key.replace("-", "_"), f"{section}." if section else ""
    siblings = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    siblings = [name for name in siblings if "." not in name]
    near = difflib.get_close_matches(key, siblings, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {prefix}{near[0]}?"
    elsewhere = [name for name in names if name.rpartition(".")[2] == key]
    if key in NAMES_ELSEWHERE or elsewhere:
        return f"; did you mean {NAMES_ELSEWHERE.get(key) or elsewhere[0]}?"
    return f"; {section or 'a recipe'} has {', '.join(siblings)}"


def _setting_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all sections and settings, without list indices."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from _setting_names(inner, f"{prefix}{name}.")


def recipe_schema() -> str:
    """JSON schema of recipes, for completion and checks in editors."""
    return json.dumps(Recipe.model_json_schema(), indent=2)
