"""Strategies that mutate a file: one change to the structure, to the bytes, or to the kind of the file.

A tree is a JSON value. A strategy draws one mutated copy and a label that says what was changed."""

import copy
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tests.hostile.fuzz.json_text import NESTED, Pairs, Raw

SECRET = "canary/secret"
"""A file outside the folder that a consumer reads. `@` stands for the absolute path of the box."""

NUMBERS: list[Any] = [
    0, 1, -1, 2, 255, 2**31, 2**32, 2**63, 2**64, 10**12, -(2**63), 10**40, 0.5, 1e308, 5e-324,
    Raw("NaN"), Raw("-Infinity"), Raw("1e999"), Raw("-0"), Raw("-0.0"), Raw("1" * 5000), True, False,
]  # fmt: skip
STRINGS: list[Any] = [
    "", ".", "..", "/", "../canary/secret", "../../canary/secret", "@/canary/secret", "@/canary/new", "../canary/new",
    "a/b", "a\0b", "a\nb", "\r\n", "\x1b[31mred", "\u202e", "-rf", "~", "$HOME", "%s%n", "x" * 100_000, "0", "NaN",
    "s3://bucket/x", "file:///etc/hostname", "http://127.0.0.1:9/x", "/dev/stdin", "/dev/zero", "nul\u0000l",
    Raw('"\\ud800"'), Raw('"\udcff\udcfe"'), Raw('"\n"'),
]  # fmt: skip
OTHERS: list[Any] = [
    None, [], {}, [[]], [0], [None], {"": 0}, [-1, 2**70], "text", {"a": {"b": [1]}},
    Raw("[" * NESTED + "]" * NESTED), Raw('{"a":' * NESTED + "1" + "}" * NESTED), Raw("[" * 990 + "]" * 990),
    Raw("[" + "0," * 300_000 + "0]"),
]  # fmt: skip
BYTES = [b"", b"\0", b"\xff\xfe", b"\n", b"null", b"[]", b"{}", b"0", b"\x80" * 64, b"{" * NESTED, b"[" * 2_000_000]

Labelled = tuple[Any, str]


def values() -> st.SearchStrategy[Any]:
    """Values that a reader may not expect: of any type, size and form."""
    return st.one_of(
        st.sampled_from(NUMBERS),
        st.sampled_from(STRINGS),
        st.sampled_from(OTHERS),
        st.integers(-(2**66), 2**66),
        st.floats(),
        st.text(max_size=20),
    ).map(_json_float)


def _json_float(value: Any) -> Any:
    """Floats as JSON of Python writes them, NaN included."""
    return Raw(repr(value).replace("nan", "NaN").replace("inf", "Infinity")) if isinstance(value, float) else value


@st.composite
def trees(draw: st.DrawFn, tree: Any) -> Labelled:
    """The tree with one change at one place, or at two."""
    labels: list[str] = []
    for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
        tree, label = draw(_changed(tree))
        labels.append(label)
    return tree, "; ".join(labels)


@st.composite
def _changed(draw: st.DrawFn, tree: Any) -> Labelled:
    tree = copy.deepcopy(tree)
    places = list(_places(tree, ()))
    if not places:
        return draw(values()), "everything replaced"
    path = draw(st.sampled_from(places))
    parent, key = _parent(tree, path), path[-1]
    old = parent[key]
    act: Callable[[], st.SearchStrategy[Any]] = draw(st.sampled_from(_acts(old, parent)))
    made = draw(act())
    label = f"{'.'.join(map(str, path))}: {_short(old)} -> {_short(made)}"
    return _put(tree, path, made), label


class _Removed:
    """Stands for a key that is removed."""

    def __repr__(self) -> str:
        return "removed"


class _Replaced:
    """Stands for pairs that replace a key."""

    def __init__(self, pairs: list[tuple[Any, Any]], words: str) -> None:
        self.pairs, self.words = pairs, words

    def __repr__(self) -> str:
        return self.words


def _acts(old: Any, parent: Any) -> list[Callable[[], st.SearchStrategy[Any]]]:
    """The changes that fit a value: each draws what is put in its place."""
    acts: list[Callable[[], st.SearchStrategy[Any]]] = [values, values, lambda: st.just(_Removed())]
    if isinstance(old, bool):
        acts += [lambda: st.just(not old)] * 2
    elif isinstance(old, int | float):
        near = [old + 1, old - 1, -old, 2 * old, old * 10, old + 2**32, float(old), str(old)]
        acts += [lambda: st.sampled_from(near), lambda: st.sampled_from(near), lambda: st.sampled_from(NUMBERS)]
    elif isinstance(old, str) and not isinstance(old, Raw):
        wrapped = [f"../{old}", f"{old}/../{old}", f"./{old}", f"/{old}", f"{old}\0", f"{old}\n", f"{old} "]
        flipped = [old[:-1] + chr(ord(old[-1]) ^ 1), old[1:], old + old] if old else ["x"]
        acts += [lambda: st.sampled_from([*wrapped, *flipped]), lambda: st.sampled_from(STRINGS)]
    elif isinstance(old, list):
        changed = [old[::-1], old + old, old[:-1], old[1:], [*old, -1], [*old, "x"], [old], old[:9] * 50]
        acts += [lambda: st.sampled_from(changed)]
    elif isinstance(old, dict):
        acts += [lambda: values().map(lambda value: {**old, "extra": value}), lambda: st.just(list(old))]
    if isinstance(parent, dict):
        acts.append(lambda: values().map(lambda value: _Replaced([(None, old), (None, value)], _twice(value))))
        names = st.sampled_from([s for s in STRINGS if not isinstance(s, Raw)])
        acts.append(lambda: names.map(lambda name: _Replaced([(name, old)], f"renamed to {_short(name)}")))
        others = [value for value in parent.values() if value is not old]
        if others:
            acts.append(lambda: st.sampled_from(others))
    return acts


def _twice(value: Any) -> str:
    return f"twice, as {_short(value)}"


def _put(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The tree with another value at the path. Objects whose keys repeat become `Pairs`."""
    parent, key = _parent(tree, path), path[-1]
    if isinstance(value, _Removed):
        del parent[key]
        return tree
    if not isinstance(value, _Replaced):
        parent[key] = value
        return tree
    pairs: list[tuple[Any, Any]] = []
    for name, item in parent.items():
        pairs += [(name if new is None else new, made) for new, made in value.pairs] if name == key else [(name, item)]
    return _put(tree, path[:-1], Pairs(pairs)) if len(path) > 1 else Pairs(pairs)


def _places(node: Any, path: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Paths of all values in a tree; of a long list, the first, second and last."""
    if isinstance(node, dict):
        keys: list[Any] = list(node)
    elif isinstance(node, list):
        keys = sorted({0, 1, len(node) - 1} & set(range(len(node))))
    else:
        return []
    return [place for key in keys for place in ((*path, key), *_places(node[key], (*path, key)))]


def _parent(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        tree = tree[key]
    return tree


@st.composite
def contents(draw: st.DrawFn, data: bytes) -> tuple[bytes, str]:
    """The bytes with one change."""
    size = len(data)
    kind = draw(st.sampled_from(["flip", "flip", "cut", "cut_front", "double", "insert", "overwrite", "other", "swap"]))
    if kind == "other" or not size:
        made = draw(st.sampled_from(BYTES))
        return made, f"replaced by {_short(made)}"
    first, last = st.integers(0, min(64, size - 1)), st.integers(max(0, size - 64), size - 1)
    at = draw(st.one_of(st.integers(0, size - 1), first, last))
    match kind:
        case "flip":
            bit = draw(st.integers(0, 7))
            return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :], f"bit {bit} of byte {at} flipped"
        case "cut":
            return data[:at], f"cut to {at} of {size} bytes"
        case "cut_front":
            return data[at:], f"the first {at} bytes removed"
        case "double":
            return data + data, "doubled"
        case "insert":
            more = draw(st.one_of(st.sampled_from(BYTES), st.binary(max_size=16)))
            return data[:at] + more + data[at:], f"{_short(more)} inserted at {at}"
        case "overwrite":
            words = st.sampled_from([b"\xff" * 8, b"\0" * 8, b"\x7f" + b"\xff" * 7])
            more = draw(st.one_of(words, st.binary(max_size=16)))
            return data[:at] + more + data[at + len(more) :], f"{_short(more)} written over byte {at}"
        case _:
            middle = data[:at]
            return data[at:] + middle, f"halves swapped at {at}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}...({len(text)} characters)"
