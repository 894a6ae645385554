"""Passwords in addresses, such as `https://me:$DATA_PASSWORD@host/data`.

An address is written to many places: recipes, job scripts, events, logs, checkpoints. So it names the environment
variable that holds the password, and never the password. `with_credentials` puts the password in where a file is
opened. `redact` removes passwords from text that is written or printed, because libraries repeat addresses in errors.
"""

import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, cast
from urllib.parse import quote

REMOVED = "***"

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30})://([^/?#\s\"'<>]*)@")
"""Scheme, and user with password, at the start of an address. Lengths are bounded: texts may be long and hostile."""
_HEADER = re.compile(r"(authorization['\"]?\s*[:=]\s*['\"]?)(?:(?:basic|bearer|digest)\s+)?[^\s'\",)]+", re.IGNORECASE)
"""A request's header, as libraries show it in their errors."""
_PARAMETER = re.compile(
    r"(?<=[?&;])([^=&;#\s\"'<>]{0,32}(?:sig|token|key|secret|passw|pwd|credential|auth)[^=&;#\s\"'<>]{0,32})"
    r"=([^&;#\s\"'<>]*)",
    re.IGNORECASE,
)
"""A part of a query whose name says that its value gives access."""


def redact(text: str) -> str:
    """The text with `***` in place of each password in an address or in a header of a request.

    A variable such as `$DATA_PASSWORD` stays."""
    text = _HEADER.sub(rf"\1{REMOVED}", text)
    return _edit(text, lambda secret: secret if _VARIABLE.fullmatch(secret) else REMOVED)


def redact_all(value: Any) -> Any:
    """A JSON value with all of its texts redacted."""
    if isinstance(value, dict):
        return {name: redact_all(inner) for name, inner in cast(dict[str, Any], value).items()}
    if isinstance(value, list | tuple):
        return [redact_all(inner) for inner in cast(list[Any], value)]
    return redact(value) if isinstance(value, str) else value


class RedactingFormatter(logging.Formatter):
    """Formats log records, with their tracebacks, without the passwords of addresses."""

    def format(self, record: logging.LogRecord) -> str:
        """The formatted record."""
        return redact(super().format(record))


def print_exception(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    """Print the traceback of a bug as Python does (`sys.excepthook`), without the passwords of addresses."""
    print(redact("".join(traceback.format_exception(kind, error, frames))), end="", file=sys.stderr)


def check_address(address: str) -> str:
    """The address. ValueError if it has a password in it."""
    found: list[str] = []
    _edit(address, lambda secret: found.append(secret) or secret)
    if not all(_VARIABLE.fullmatch(secret) for secret in found):
        raise ValueError(
            f"{redact(address)} has a password in it, which recipes, logs and checkpoints would show; put the "
            "password into an environment variable and name it there, such as 'https://USER:$NAME@HOST' (in single "
            "quotes in a shell)"
        )
    return address


def with_credentials(address: str) -> str:
    """The address with the values of the variables that its passwords name. ValueError if one is not set."""
    return _edit(address, _value)


def without_credentials(address: str, named: str) -> str:
    """An address below `with_credentials(named)`, with the variables that `named` has in place of their values."""
    opened, shown = (found[0] if (found := _USER.match(each)) else "" for each in (with_credentials(named), named))
    return address.replace(opened, shown, 1)


def expand_outside_credentials(address: str, expand: Callable[[str], str]) -> str:
    """The address, expanded except for the passwords in it."""
    kept: list[str] = []

    def hide(secret: str) -> str:
        kept.append(secret)
        return f"\0{len(kept) - 1}\0"

    return re.sub("\0(\\d+)\0", lambda match: kept[int(match[1])], expand(_edit(address, hide)))


def _value(secret: str) -> str:
    name = _VARIABLE.fullmatch(secret)
    if name is None:
        return secret
    value = os.environ.get(name[1] or name[2])
    if value is None:
        raise ValueError(f"the variable {secret} of an address is not set; set it to the password")
    return quote(value, safe="")


def _edit(text: str, change: Callable[[str], str]) -> str:
    """The text with each password in an address replaced by `change` of it."""
    if "://" not in text:
        return text
    text = _USER.sub(lambda found: f"{found[1]}://{_of_user(found[1], found[2], change)}@", text)
    return _PARAMETER.sub(lambda found: f"{found[1]}={change(found[2])}", text)


def _of_user(scheme: str, user: str, change: Callable[[str], str]) -> str:
    """`USER:PASSWORD` with the password changed. Without a colon, HTTP's user may be a token and counts as one."""
    name, colon, password = user.partition(":")
    if colon and password:
        return f"{name}:{change(password)}"
    return change(name) if name and not colon and scheme.lower().startswith("http") else user
