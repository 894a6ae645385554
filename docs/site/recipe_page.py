"""Generates the reference of recipes from their pydantic models."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tables import cell, named, table
from train.config import Recipe

SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤", "min_length": "length ≥", "pattern": "matches"}
"""Attribute of a pydantic constraint: how the page shows it."""


@dataclass(frozen=True)
class Setting:
    """One setting of a recipe."""

    name: str
    """Dotted name without list indices, such as `data.sources.path`."""
    field: FieldInfo


def settings(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[Setting]:
    """Yields every setting, depth first; sections and lists of sections are not settings themselves."""
    for name, field in model.model_fields.items():
        section = _section_of(field.annotation)
        if section is None:
            yield Setting(prefix + name, field)
        else:
            yield from settings(section, f"{prefix}{name}.")


def page() -> str:
    """Returns the page: one table for each section of a recipe."""
    return (
        "# Recipe\n\nA recipe is one YAML file. Every setting can be replaced on the command line, for example "
        "`train.steps=200` or `data.sources.0.path=data/main`. A setting without a default must be given.\n\n"
        + "\n".join(_sections(Recipe, ""))
    )


def _sections(model: type[BaseModel], prefix: str, introduction: str = "") -> Iterator[str]:
    """Yields the model's own section, and then those of its fields."""
    title = prefix.rstrip(".") or "top level"
    own = [
        _row(prefix + name, field) for name, field in model.model_fields.items() if not _section_of(field.annotation)
    ]
    anchor = title.replace(".", "-").replace(" ", "-")
    yield f"## {title} {{#{anchor}}}\n\n{cell(introduction or model.__doc__ or '')}\n\n"
    yield table(("Setting", "Type and rule", "Default", "Meaning"), own)
    if rules := list(_rules(model)):
        yield "Rules across settings:\n\n" + "".join(f"- {rule}\n" for rule in rules)
    for name, field in model.model_fields.items():
        if section := _section_of(field.annotation):
            yield from _sections(section, f"{prefix}{name}.", _introduction(f"{prefix}{name}", field))


def _introduction(name: str, field: FieldInfo) -> str:
    """Returns what stands before the table of a section; empty if its class says it."""
    match get_origin(field.annotation):
        case None:
            return ""
        case origin if origin is tuple:
            return f"A list; `{name}.0` is its first item. {field.description}"
        case _:
            return field.description or ""


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """Returns the pydantic model that a field holds, alone or in a tuple."""
    for inner in (annotation, *get_args(annotation)):
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            return inner
    return None


def _row(name: str, field: FieldInfo) -> tuple[str, str, str, str]:
    default = "" if field.is_required() else f"`{_yaml(field.default)}`"
    kind = ", ".join([_type(field.annotation), *_constraints(field)])
    return named(name), kind, default, cell(field.description or "")


def _type(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in inner)
    if origin in (Union, UnionType):
        return " or ".join(_type(one) for one in inner)
    if origin is tuple:
        return f"list of {_type(inner[0])}" if inner[-1] is Ellipsis else f"{len(inner)} x {_type(inner[0])}"
    return "null" if annotation is NoneType else annotation.__name__


def _constraints(field: FieldInfo) -> Iterator[str]:
    for constraint in field.metadata:
        for attribute, sign in SIGNS.items():
            if (value := getattr(constraint, attribute, None)) is not None:
                yield f"{sign} `{value}`" if attribute == "pattern" else f"{sign} {value}"


def _rules(model: type[BaseModel]) -> Iterator[str]:
    """Yields the sentences in the docstrings of the model's validators."""
    for name, validator in model.__pydantic_decorators__.model_validators.items():
        assert validator.func.__doc__, f"{model.__name__}.{name} has no docstring that states its rules"
        yield from re.split(r"(?<=\.) ", cell(validator.func.__doc__))


def _yaml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_yaml(one) for one in cast(tuple[Any, ...], value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
