"""Reads a recipe from YAML and dotted overrides, and writes the resolved one.

Every scalar is read as text, in the file and on the command line alike, and the declared type of its field decides
what it means. So `1e-4` is a float for a float field, `010` is 10, `no` is text or False as the field asks, and
nothing depends on YAML's own guesses.
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

NAMES_ELSEWHERE = {
    "learning_rate": "optim.lr",
    "max_steps": "train.steps",
    "num_epochs": "train.steps",
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
"""What other training systems call our settings."""


class _TextLoader(yaml.SafeLoader):
    """YAML whose scalars stay text, but for null; repeated keys are refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


_TextLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag == "tag:yaml.org,2002:null"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe at `path` with overrides such as `train.steps=200`. ConfigError names what is wrong."""
    tree = _read_tree(Path(path))
    for override in overrides:
        _apply(tree, override)
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def recipe_as_yaml(recipe: Recipe) -> str:
    """The resolved recipe, every setting stated, in an order that does not depend on how it was written."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, width=120)


def _read_tree(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"the recipe {path} does not exist; `ls recipes/` shows those that come along") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the recipe {path} cannot be read: {error}") from None
    try:
        tree = yaml.load(text, _TextLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"the recipe {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"the recipe {path} must hold sections such as `model:` and `train:`, but it does not")
    return tree


def _apply(tree: dict[str, Any], override: str) -> None:
    """Set `a.b.0.c=value` in the tree, making sections as needed."""
    dotted, equals, text = override.removeprefix("--").partition("=")
    if not equals or not dotted:
        raise ConfigError(f"the override {override!r} must read SECTION.KEY=VALUE, such as train.steps=200")
    *parents, last = dotted.split(".")
    node: Any = tree
    for key in parents:
        node = _child(node, key, dotted)
    try:
        value = yaml.load(text, _TextLoader) if text else ""
    except yaml.YAMLError:
        value = text
    if isinstance(node, list):
        node[_index(node, last, dotted)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise ConfigError(f"the override {dotted} goes through {parents[-1]}, which is not a section")


def _child(node: Any, key: str, dotted: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, key, dotted)]
    if not isinstance(node, dict):
        raise ConfigError(f"the override {dotted} goes through a value that is not a section, at {key}")
    if node.get(key) is None:
        node[key] = {}
    return node[key]


def _index(node: list[Any], key: str, dotted: str) -> int:
    if not key.isdigit() or int(key) >= len(node):
        raise ConfigError(f"the override {dotted} needs a number below {len(node)} where it says {key!r}")
    return int(key)


def _explain(error: ValidationError) -> str:
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
    """The nearest name in the same section, or else the same name in another section."""
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
    for name, field in model.model_fields.items():
        yield prefix + name
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from _setting_names(inner, f"{prefix}{name}.")


def recipe_schema() -> str:
    """JSON schema of recipes, for editors."""
    return json.dumps(Recipe.model_json_schema(), indent=2)
