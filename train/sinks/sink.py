"""What a sink is, and the names under which metrics go to all sinks."""

from collections.abc import Mapping
from typing import Any, Protocol

from data_pipeline.credentials import redact_all

Figures = Mapping[str, float]
"""Values of one step by tag, such as `train/loss`."""

TAGS = {
    "tokens_per_second": "speed/tokens_per_second",
    "model_flops_per_second": "speed/model_flops_per_second",
    "share_of_measured_peak": "speed/share_of_measured_peak",
    "mfu": "speed/mfu",
    "memory_gib": "device/memory_gib",
    "attempt": "run/attempt",
    "uptime": "run/uptime",
}
"""Name in metrics.jsonl -> tag, where the rule of `tag_of` does not give it."""
PREFIXES = {"average_validation_": "validation/average_", "validation_": "validation/", "device_": "device/"}
"""Beginning of a name -> the group and the beginning that take its place."""


class Sink(Protocol):
    """A place besides metrics.jsonl to which the metrics of a run go."""

    @property
    def lacks_from(self) -> int | None:
        """The first step that it may lack of earlier attempts, which it then gets; None: it needs none of them."""
        ...

    def log(self, step: int, figures: Figures) -> None:
        """Write the values of a step. A step may come again, after a roll-back."""
        ...

    def close(self) -> None:
        """Finish writing: the attempt ends without an error."""
        ...


def tag_of(name: str) -> str:
    """Return the tag of a name in metrics.jsonl: its group and its name, such as `train/loss`."""
    if name in TAGS:
        return TAGS[name]
    for prefix, group in PREFIXES.items():
        if name.startswith(prefix):
            return group + name.removeprefix(prefix)
    is_grouped = "/" in name and not name.startswith("loss/")
    return name if is_grouped else f"train/{name}"


def figures_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record of metrics.jsonl by tag; its seconds by kind as `seconds/KIND`."""
    seconds: Mapping[str, float] = record.get("seconds", {})
    named = {
        tag_of(name): float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and name not in ("time", "step")
    }
    return named | {f"seconds/{kind}": value for kind, value in seconds.items()}


def settings_of(recipe: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Return the settings of a recipe by dotted name, without passwords. A list becomes `NAME.0`, `NAME.1`, ..."""
    found: dict[str, bool | int | float | str] = {}
    pending: list[tuple[str, Any]] = [("", redact_all(recipe))]
    while pending:
        name, value = pending.pop(0)
        if isinstance(value, list | tuple):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            pending[:0] = [(f"{name}.{key}".removeprefix("."), inner) for key, inner in value.items()]
        else:
            found[name] = value if isinstance(value, bool | int | float | str) else "null"
    return found
