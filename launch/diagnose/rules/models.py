"""Messages of import, export and generation; they are no part of a run."""

from functools import partial

from launch.diagnose.rule import Action, Level, Rule

_rule = partial(Rule, section="Import, export, generate", level=Level.MANUAL, action=Action.STOP)

RULES = (
    _rule(
        name="unpickled-source",
        sees=("add --trust if you know where it comes from",),
        cause="the source is unpickled, which can run code",
        remedy="trust it only if you know its author",
    ),
    _rule(
        name="other-model",
        sees=("are not those of the recipe's model",),
        cause="the recipe describes another model",
        remedy="compare layers, widths and vocabulary with the source",
    ),
    _rule(
        name="no-architecture",
        sees=("no Hugging Face architecture has",),
        cause="the model mixes settings that no known class has",
        remedy="export needs the style of Llama, Qwen3 or GPT-2",
    ),
    _rule(
        name="no-safetensors",
        sees=("has no *.safetensors",),
        cause="the folder has only pickled weights",
        remedy="save it with `safe_serialization=True`",
    ),
)
"""The documentation keeps this order."""
