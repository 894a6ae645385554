"""Short names of the sources, for metrics."""

from collections.abc import Sequence


def source_names(addresses: Sequence[str]) -> tuple[str, ...]:
    """A different name for each source: the last part of its address, or as many parts as make it different.

    An address that comes twice gets its position among the sources as well."""
    parts = [[part for part in address.split("/") if part not in ("", ".")] or [address] for address in addresses]
    names = []
    for number, own in enumerate(parts):
        others = [other for other in parts if other != own]
        depth = next(
            depth for depth in range(1, len(own) + 1) if depth == len(own) or own[-depth:] not in _ends(others, depth)
        )
        name = "/".join(own[-depth:])
        names.append(name if parts.count(own) == 1 else f"{name}.{number}")
    return tuple(names)


def _ends(parts: Sequence[list[str]], depth: int) -> list[list[str]]:
    return [other[-depth:] for other in parts]
