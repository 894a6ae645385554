"""What a check of `keepstep doctor` has to say."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    level: Literal["ok", "note", "problem"]
    what: str
    why: str = ""
    do: str = ""
