"""What a format is to the fuzzer: a valid folder, the files to mutate, and the functions that read them.

A codec turns a file into a tree and back. Where the format has checksums, the codec computes them again, so that the
mutation reaches the code behind them.
"""

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.hostile.fuzz import mutate
from tests.hostile.fuzz.box import SPECIALS, Special
from tests.hostile.fuzz.json_text import Pairs, Raw


class Files(dict[str, bytes]):
    """The files of a folder, by path. The short representation is for hypothesis."""

    def __repr__(self) -> str:
        return f"{len(self)} files"


@dataclass(frozen=True)
class Codec:
    """Reads a file as a tree, or as bytes, and writes the tree again with all checksums that cover it."""

    decode: Callable[[bytes], Any]
    encode: Callable[[Files, str, Any], dict[str, bytes]]
    """The files that change, given all files, the name of the file and its new tree."""
    is_signed: bool = True
    """Whether what it writes of an unchanged tree is accepted."""


@dataclass(frozen=True)
class Consumer:
    """A function that reads the folder and returns a text of all that it computes."""

    name: str
    call: Callable[[Path, Path], str]
    """Reads the first folder; may write to the second."""
    exact: bool = True
    """Whether an accepted file must give the text of the valid one. False: its content is the user's to choose."""
    accepts: bool = False
    """Whether every file must be accepted: damaged logs block nothing."""
    errors: tuple[type[Exception], ...] = ()
    """Errors that are documented for this function, besides the errors of the packages."""
    unpickles: tuple[str, ...] = ()
    """Modules of which a pickle may name classes. `*`: any, because the user trusts the file."""


@dataclass(frozen=True)
class Format:
    """A kind of file that Keepstep reads."""

    name: str
    build: Callable[[Path], None]
    """Fills a new folder with valid files."""
    targets: list[tuple[str, Codec | None]]
    """Files to mutate, each with a codec; without one, as bytes."""
    consumers: list[Consumer]
    free: str
    """What may change without being refused, and why."""
    special: bool = True
    """Whether links, FIFOs, sockets and the like are put in place of files."""
    texts: tuple[bytes, ...] = ()
    """Whole contents to try besides."""


@dataclass(frozen=True)
class Input:
    """A mutated folder: the files that differ, and what was done."""

    changes: dict[str, bytes | Special]
    label: str
    is_special: bool = False
    """Whether something else stands in place of a file."""
    is_link: bool = False
    """Whether it is a link, which may be read."""


REFUSALS = (1, 2)
"""Exit codes of an error that a user can fix."""


class RefusedError(Exception):
    """A command or a function refused its input."""


def command(*argv: str) -> str:
    """What the command prints. RefusedError if it ends with an error of one line."""
    from launch.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    if code == 0:
        return out.getvalue()
    lines = err.getvalue().splitlines()
    assert code in REFUSALS, (code, lines[-3:])
    assert lines, f"{argv[0]} ended with exit code {code} and no message"
    raise RefusedError(lines[-1])


def inputs(chosen: Format, files: Files, box: Path) -> st.SearchStrategy[Input]:
    """Mutations of one file of the format, of its structure, its bytes or its kind."""

    @st.composite
    def drawn(draw: st.DrawFn) -> Input:  # without arguments: hypothesis shows a strategy with its arguments
        return _mutated(draw, chosen, files, box)

    return drawn()


def _mutated(draw: st.DrawFn, chosen: Format, files: Files, box: Path) -> Input:
    name, codec = draw(st.sampled_from(chosen.targets))
    way = draw(st.integers(0, 19))
    if chosen.texts and way in (1, 2):
        text = draw(st.sampled_from(chosen.texts))
        return Input({name: text}, f"{name}: {text[:50]!r} and so on, {len(text)} bytes")
    if chosen.special and way == 0:
        special = draw(st.sampled_from(SPECIALS))
        return Input({name: special}, f"{name}: {special.kind}", True, special.kind in ("secret", "zeros"))
    if codec is None or way <= 4:
        data, label = draw(mutate.contents(files[name]))
        return Input({name: data}, f"{name}: {label}")
    tree = codec.decode(files[name])
    made, label = draw(mutate.contents(tree) if isinstance(tree, bytes) else mutate.trees(tree))
    try:
        changes = codec.encode(files, name, located(made, str(box)))
    except Exception as error:
        raise AssertionError(f"the codec of {name} failed: {label}") from error
    return Input(dict(changes), f"{name}, checksums computed again: {label}")


def located(tree: Any, box: str) -> Any:
    """The tree with `@` in texts replaced by the path of the box."""
    if isinstance(tree, Raw) or not isinstance(tree, str | dict | list | Pairs):
        return tree
    if isinstance(tree, str):
        return tree.replace("@/canary", f"{box}/canary")
    if isinstance(tree, Pairs):
        return Pairs([(located(key, box), located(value, box)) for key, value in tree.pairs])
    if isinstance(tree, dict):
        return {located(key, box): located(value, box) for key, value in tree.items()}
    return [located(item, box) for item in tree]
