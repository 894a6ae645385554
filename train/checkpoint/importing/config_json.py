"""Reads the config.json of a Hugging Face folder as settings of our model, and compares them with a recipe.

transformers takes a default for each field that is missing, so the tables in `architectures.py` have the same defaults.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.untrusted import parse_json, read_file
from train.checkpoint.importing.architectures import ARCHITECTURES, HARMLESS, ONLY, READ_ELSEWHERE, Architecture
from train.errors import CheckpointError
from train.model.config import ModelConfig

CONFIG = "config.json"
DEFAULT_THETA = 10_000.0
"""Base of RoPE that transformers takes if config.json has none."""


@dataclass(frozen=True)
class Stated:
    """What a source states of its model."""

    settings: dict[str, Any]
    """Settings of the section `model`. `seq_len` is among them only if positions are learned."""
    max_seq_len: int | None = None
    """Longest sequence for which the function is ours, because of a sliding window; None for any."""
    trained_seq_len: int | None = None
    """Longest sequence that the model was made for; longer ones compute, but are new to it."""


def read_stated(folder: Path) -> Stated | None:
    """The model that `folder/config.json` states; None without such a file, or if it is not of transformers.

    CheckpointError that names every field whose function our model lacks."""
    path = folder / CONFIG
    if not path.is_file():
        return None
    try:
        config = parse_json(read_file(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}; save the model again") from error
    if not isinstance(config, dict) or "model_type" not in config:
        return None
    return stated_by(config, str(path))


def stated_by(config: Mapping[str, Any], location: str) -> Stated:
    """The model that the fields of a config.json describe. CheckpointError if our model does not compute it."""
    kind = config["model_type"]
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise CheckpointError(
            f"{location}: model_type {str(kind)[:100]!r} computes another function than Keepstep's model; only "
            f"{', '.join(ARCHITECTURES)} can be imported"
        )
    architecture = ARCHITECTURES[kind]
    settings = architecture.style | {
        ours: config.get(theirs, default) for ours, (theirs, default) in architecture.fields.items()
    }
    settings["mup"] = None  # its multipliers would change the function
    problems = _other_values(config, architecture) + _unknown(config, architecture)
    if kind == "llama" and bool(config.get("mlp_bias")) != bool(settings["bias"]):
        problems.append(f"attention_bias {settings['bias']!r} with mlp_bias {config.get('mlp_bias')!r} (must be equal)")
    if settings["positions"] == "rope":
        settings["rope_theta"], more = _rope(config)
        problems += more
    problems += _sizes(settings, config.get("head_dim", architecture.head_dim))
    layers = config.get("layer_types")
    if layers is not None and (not isinstance(layers, list) or any(layer != "full_attention" for layer in layers)):
        problems.append(f"layer_types {layers!r} (every layer must be 'full_attention')")
    uses_window = config.get("use_sliding_window", architecture.uses_window)
    window = config.get("sliding_window", architecture.window) if uses_window else None
    if window is not None and not _is_size(window):
        problems.append(f"sliding_window {window!r} (must be a whole number above 0, or null)")
    longest = config.get("max_position_embeddings", config.get("n_positions"))
    if longest is not None and not _is_size(longest):
        problems.append(f"max_position_embeddings {longest!r} (must be a whole number above 0, or null)")
    if problems:
        shown = "; ".join(problem[:300] for problem in problems[:20])
        raise CheckpointError(
            f"{location} has fields that Keepstep's model does not compute or does not know: {shown}; "
            "a field that changes no logits can be removed from the file, then import with --check"
        )
    return Stated(settings, window, longest)


def check_stated(stated: Stated, model: ModelConfig, location: str) -> None:
    """CheckpointError that lists each setting in which the recipe's model differs from the source's."""
    ours = model.model_dump() | {"n_kv_heads": model.kv_heads, "d_ff": model.ff_width}
    differing = [
        f"model.{name} is {ours[name]!r} in the recipe, {value!r} in the source"
        for name, value in stated.settings.items()
        if not _fits(name, ours[name], value)
    ]
    if stated.max_seq_len is not None and model.seq_len > stated.max_seq_len:
        differing.append(
            f"model.seq_len is {model.seq_len} in the recipe, longer than the source's sliding_window "
            f"({stated.max_seq_len}), which Keepstep's model lacks"
        )
    if differing:
        raise CheckpointError(
            f"the recipe's model is not that of {location}: {'; '.join(differing)}; set these in the recipe, or leave "
            "the recipe out: the import then writes one"
        )


def _fits(name: str, ours: Any, theirs: Any) -> bool:
    if name == "vocab_size":  # rows may be added as padding
        return ours >= theirs
    if isinstance(ours, float) and isinstance(theirs, int | float) and not isinstance(theirs, bool):
        return math.isclose(ours, theirs, rel_tol=1e-9)
    return ours == theirs


def _other_values(config: Mapping[str, Any], architecture: Architecture) -> list[str]:
    """Fields that must have certain values and have another."""
    rules = ONLY | architecture.only
    return [
        f"{name} {config[name]!r} (must be {' or '.join(repr(value) for value in rules[name])})"
        for name in sorted(rules.keys() & config.keys())
        if config[name] not in rules[name]
    ]


def _unknown(config: Mapping[str, Any], architecture: Architecture) -> list[str]:
    """Fields that no table has, unless they are null."""
    mapped = {theirs for theirs, _ in architecture.fields.values()}
    known = mapped | ONLY.keys() | architecture.only.keys() | HARMLESS | READ_ELSEWHERE
    return [
        f"{ascii(name)[1:-1]} {value!r} (not known)"
        for name, value in config.items()
        if name not in known and value is not None
    ]


def _sizes(settings: dict[str, Any], head_dim: Any) -> list[str]:
    """Resolve the defaults that depend on other sizes, and check that sizes are whole numbers and fit each other."""
    if settings.get("n_kv_heads") is None:
        settings["n_kv_heads"] = settings["n_heads"]
    if settings["d_ff"] is None:
        settings["d_ff"] = 4 * settings["d_model"]
    sizes = ("vocab_size", "d_model", "d_ff", "n_layers", "n_heads", "n_kv_heads")
    bad = [
        f"{name} {settings[name]!r} (must be a whole number above 0)" for name in sizes if not _is_size(settings[name])
    ]
    if not bad and head_dim is not None and head_dim * settings["n_heads"] != settings["d_model"]:
        bad.append(
            f"head_dim {head_dim!r} (must be hidden_size / num_attention_heads, "
            f"{settings['d_model']} / {settings['n_heads']})"
        )
    return bad


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _rope(config: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Base of RoPE, and each field that makes RoPE another function. Both places of transformers are read: 4 has
    `rope_theta` and `rope_scaling`, 5 has `rope_parameters`."""
    problems: list[str] = []
    thetas = [] if config.get("rope_theta") is None else [config["rope_theta"]]
    for place in ("rope_parameters", "rope_scaling"):
        table = config.get(place) or {}
        if not isinstance(table, Mapping):
            problems.append(f"{place} {table!r} (must be a table)")
            continue
        if "rope_theta" in table:
            thetas.append(table["rope_theta"])
        others = {key: value for key, value in table.items() if key != "rope_theta"}
        if any(value not in _ROPE_OFF.get(key, (None,)) for key, value in others.items()):
            problems.append(f"{place} {dict(table)!r} (only unscaled RoPE of whole heads, rope_type 'default')")
    if any(theta != thetas[0] for theta in thetas):
        problems.append(f"rope_theta {' and '.join(repr(theta) for theta in thetas)} (given twice, not equal)")
    return thetas[0] if thetas else DEFAULT_THETA, problems


_ROPE_OFF: dict[str, tuple[Any, ...]] = {
    "rope_type": ("default", None),
    "type": ("default", None),
    "partial_rotary_factor": (1, None),
    "factor": (1, None),
}
"""Values of the keys of `rope_parameters` and `rope_scaling` that leave RoPE as it is. Other keys must be null."""
