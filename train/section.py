"""The base class of the recipe's sections of this package."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of a recipe. It is frozen, refuses unknown keys and numbers that are not finite, and takes descriptions
    from docstrings of fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


def nearest_multiple(value: int, of: int) -> int:
    """The positive multiple of `of` that is nearest to `value`."""
    return max(1, round(value / of)) * of
