"""The base class of the recipe's sections."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen, and no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def nearest_multiple(value: int, of: int) -> int:
    return max(1, round(value / of)) * of
