"""Events of a run as text for people."""

from collections.abc import Mapping
from typing import Any, cast

from launch.terminal import duration, size


def describe(event: Mapping[str, Any]) -> str:
    """Return the details of an event, such as `step 40, 12.3 MB, took 0.3 s`; without its time and kind."""
    details = ((name, value) for name, value in event.items() if name not in ("time", "uptime", "kind"))
    return ", ".join(_detail(name, value) for name, value in details if not _is_empty(value))


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)


def _detail(name: str, value: Any) -> str:
    words = name.replace("_", " ")
    if name == "seconds" and isinstance(value, Mapping):
        kinds = cast(Mapping[str, float], value)
        return ", ".join(f"{kind.replace('_', ' ')} {duration(seconds)}" for kind, seconds in kinds.items())
    if isinstance(value, Mapping):
        parts = cast(Mapping[str, Any], value)
        return f"{words} ({_parts(parts)})"
    if isinstance(value, int | float) and not isinstance(value, bool):
        if name == "bytes" or name.endswith("_bytes"):
            return f"{words} {size(value)}".removeprefix("bytes ")
        if name in ("seconds", "uptime") or name.endswith("_seconds"):
            return f"{'took' if name == 'seconds' else words.removesuffix(' seconds')} {duration(value)}"
        return f"{words} {value:,}" if isinstance(value, int) else f"{words} {value:.4g}"
    if isinstance(value, list):
        return f"{words} {', '.join(_item(item) for item in cast(list[Any], value))}"
    return f"{words} {value}"


def _parts(parts: Mapping[str, Any]) -> str:
    return ", ".join(_detail(part, value) for part, value in parts.items() if not _is_empty(value))


def _item(item: Any) -> str:
    if isinstance(item, Mapping):
        return f"({_parts(cast(Mapping[str, Any], item))})"
    return f"({', '.join(map(_item, cast(list[Any], item)))})" if isinstance(item, list) else str(item)
