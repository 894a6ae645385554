"""Reads YAML as text, within limits: nothing that a file contains takes long or much memory to read.

Every scalar stays text, except null, so YAML's own guesses have no effect. Repeated keys are errors.
"""

from pathlib import Path
from typing import Any

import yaml

from data_pipeline.untrusted import read_file

MAX_BYTES = 1 << 20
"""Size of the largest recipe."""
MAX_VALUES = 20_000
"""Values that a recipe may have after its YAML aliases are expanded."""
MAX_DEPTH = 64
"""Levels of mappings and lists that a recipe may have."""
_KEPT_TAGS = ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")


class TooMuchError(ValueError):
    """A text has more values or levels than a recipe may have, once its aliases are expanded."""


def read_text(path: Path) -> str:
    """The text of a file in UTF-8. OSError if it is no regular file or too large; UnicodeDecodeError."""
    return read_file(path, limit=MAX_BYTES).decode("utf-8")


def parse(text: str) -> Any:
    """The value of a YAML text, no part of which occurs twice in memory. TooMuchError if it is too large."""
    loader = _TextLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _expanded_size(node, {}) > MAX_VALUES:
            raise TooMuchError
        return _unshared(loader.construct_document(node))
    finally:
        loader.dispose()


class _TextLoader(yaml.SafeLoader):
    """Loads YAML whose scalars stay text, except null and the merge key `<<`."""

    values = depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """The next node. TooMuchError as soon as there are too many, or too many inside each other."""
        self.values, self.depth = self.values + 1, self.depth + 1
        if self.values > MAX_VALUES or self.depth > MAX_DEPTH:
            raise TooMuchError
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node. ConstructorError if a key is repeated."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is not a text", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value[:200]!r} is given twice", node.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_TextLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag in _KEPT_TAGS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _expanded_size(node: yaml.Node, known: dict[int, float]) -> float:
    """Number of nodes below and including this one, aliases expanded; infinite if it contains itself."""
    if id(node) not in known:
        known[id(node)] = float("inf")  # what a node inside itself finds
        children: list[Any] = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
        known[id(node)] = 1 + sum(_expanded_size(part, known) for part in parts)
    return known[id(node)]


def _unshared(value: Any) -> Any:
    """A copy in which the value of an alias is separate from that of its anchor, so that overrides change one."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value
