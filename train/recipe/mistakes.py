"""What a recipe that was refused needs: the settings that are wrong, and names that were probably meant."""

import difflib
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from train.config import Recipe

MOST = 20
"""Mistakes that are named."""
LONGEST = 200
"""Characters of a value that are shown."""
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


def explain(error: ValidationError) -> str:
    """The errors as one line, the innermost of each setting alone, and MOST of them."""
    items = error.errors(include_url=False)
    inner = {item["loc"][:depth] for item in items for depth in range(1, len(item["loc"]))}
    shown = [item for item in items if item["loc"] not in inner]
    more = [f"and {len(shown) - MOST} more"] if len(shown) > MOST else []
    return "; ".join([*(_explain_one(item) for item in shown[:MOST]), *more])


def _explain_one(item: Any) -> str:
    where = ".".join(str(part)[:LONGEST] for part in item["loc"])
    if item["type"] == "extra_forbidden":
        section, _, key = where.rpartition(".")
        return f"unknown setting {where}{_suggest(section, key)}"
    if item["type"] == "missing":
        return f"the setting {where} is missing"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return f"{where}: {message}" if where else message
    return f"{where} ({_shortened(repr(item['input']))}): {message[0].lower()}{message[1:]}"


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _suggest(section: str, key: str) -> str:
    """A hint: the most similar name in the section, the same name in another section, or all names of the section."""
    names = list(setting_names(Recipe))
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


def setting_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all sections and settings, without list indices."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from setting_names(inner, f"{prefix}{name}.")
