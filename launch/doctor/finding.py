"""The result of one check of `keepstep doctor`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """What a check found, why it matters for a run, and the remedy."""

    level: Literal["ok", "note", "problem"]
    what: str
    why: str = ""
    """Effect on a run; "" if all is well."""
    do: str = ""
    """Remedy; "" if all is well."""
