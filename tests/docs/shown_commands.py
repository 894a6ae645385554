"""Finds the commands that README.md and the pages of docs/ show, and checks that they parse."""

# argparse has no public way to look at a parser's options.
# pyright: reportPrivateUsage=false

import argparse
import ast
import contextlib
import importlib.util
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launch import cli
from train.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "slurm/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
COMMAND_LANGUAGES = ("bash", "console")
MARK = re.compile(r"<!-- (?P<kind>run|run by|not run:)(?: (?P<rest>.+))? -->")
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+|~~~+)(?P<language>\S*)")
INLINE = re.compile(r"(?<!`)`(keepstep [^`]+)`")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    """Line number of the opening fence, from 1."""
    language: str
    mark: str
    """The line above the fence."""
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def script(self) -> str:
        """The commands as one shell script, without the output that a console block shows."""
        if self.language == "bash":
            return self.text
        lines = self.text.replace("\\\n", "\\\0").splitlines()
        return "\n".join(line.removeprefix("$ ").replace("\0", "\n") for line in lines if line.startswith("$ "))


def blocks(page: Path) -> Iterator[Block]:
    """Yields the fenced blocks of a page."""
    lines = page.read_text(encoding="utf-8").splitlines()
    numbers = iter(range(len(lines)))
    for start in numbers:
        opening = FENCE.match(lines[start])
        if opening is None:
            continue
        inside = []
        for number in numbers:
            if lines[number].strip() == opening["ticks"]:
                break
            inside.append(lines[number].removeprefix(opening["indent"]))
        else:
            raise AssertionError(f"{page}:{start + 1}: the fence is never closed")
        mark = lines[start - 1].strip() if start else ""
        yield Block(page, start + 1, opening["language"], mark, "\n".join(inside))


def command_blocks(page: Path) -> list[Block]:
    """Returns the blocks of a page that show commands."""
    return [block for block in blocks(page) if block.language in COMMAND_LANGUAGES]


def commands(script: str) -> Iterator[list[str]]:
    """Yields the simple commands of a shell script as words, without redirections and variable assignments."""
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        tokens = iter(lexer)
        for token in tokens:
            if set(token) <= set("<>"):
                next(tokens)
            elif set(token) <= set("();|&"):
                yield from [words] if words else []
                words = []
            elif words or not re.fullmatch(r"\w+=.*|\$", token):
                words.append(token)
        yield from [words] if words else []


def inline_commands(page: Path) -> list[list[str]]:
    """Returns the words of each `keepstep ...` that a page shows as inline code."""
    text = page.read_text(encoding="utf-8")
    for block in blocks(page):
        text = text.replace(block.text, "") if block.text else text
    return [shlex.split(shown, comments=True) for shown in INLINE.findall(text)]


def problem(words: list[str]) -> str:
    """Returns what is wrong with a command, or an empty string. Programs other than ours are not checked."""
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return "; ".join(
            f"the Makefile has no target {word}" for word in words[1:] if word.isalpha() and word not in targets
        )
    for recipe in (word for word in words if re.fullmatch(r"recipes/[\w-]+\.yaml", word)):
        if not (ROOT / recipe).exists():
            return f"{recipe} does not exist"
    names = [Path(word).name for word in words]
    if "keepstep" in names and "--module" not in words:
        return keepstep_problem(words[names.index("keepstep") + 1 :])
    for option in ("-m", "--module"):
        if option in words:
            module, *arguments = words[words.index(option) + 1 :]
            return module_problem(module, arguments)
    return ""


def keepstep_problem(words: list[str]) -> str:
    """Returns why `keepstep` refuses these arguments, or an empty string. Nothing is executed."""
    if not words or words[0].startswith("-"):
        return ""
    if words[0] not in cli.COMMANDS:
        return f"there is no command {words[0]}"
    parser = cli.command_parser(words[0])
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            options = cli._parse(parser, words[1:])
        except ConfigError as error:
            return str(error)
        except SystemExit as end:
            return said.getvalue().splitlines()[-1] if end.code else ""
    return overrides_problem(getattr(options, "overrides", None) or [])


def module_problem(module: str, arguments: list[str]) -> str:
    """Returns why `python -m module` refuses these arguments, or an empty string."""
    with contextlib.suppress(ModuleNotFoundError):
        if importlib.util.find_spec(module) is not None:
            return train_problem(arguments) if module == "train" else ""
    return f"there is no module {module}"


def train_problem(arguments: list[str]) -> str:
    """Returns why `python -m train` refuses these arguments, or an empty string."""
    calls = [
        node for node in ast.walk(ast.parse((ROOT / "train" / "__main__.py").read_text())) if isinstance(node, ast.Call)
    ]
    known = {text for call in calls for text in map(ast.literal_eval, filter(_is_text, call.args)) if text[:2] == "--"}
    options = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    if unknown := [option for option in options if option not in known]:
        return f"python -m train has no option {unknown[0]}"
    return overrides_problem([word for word in arguments if "=" in word and not word.startswith("-")])


def overrides_problem(overrides: list[str]) -> str:
    """Returns which override names no setting of a recipe, or an empty string."""
    from recipe_page import settings

    known = {setting.name for setting in settings()}
    for override in overrides:
        name = ".".join(part for part in override.partition("=")[0].split(".") if not part.isdigit())
        if name != "..." and name not in known:
            return f"a recipe has no setting {name}"
    return ""


def inline_problem(words: list[str]) -> str:
    """Returns which subcommand or option of an inline `keepstep ...` does not exist, or an empty string."""
    _, *rest = words
    if not rest or rest[0].startswith("-"):
        return ""
    name, *rest = rest
    if name not in cli.COMMANDS:
        return "" if name.isupper() else f"there is no command {name}"
    parser = cli.command_parser(name)
    while rest and (choices := _subcommands(parser)) and not rest[0].startswith("-"):
        if rest[0] not in choices:
            return "" if rest[0].isupper() else f"{parser.prog} has no subcommand {rest[0]}"
        parser, rest = choices[rest[0]], rest[1:]
    options = [word.partition("=")[0] for word in rest if word.startswith("--")]
    unknown = [option for option in options if option not in parser._option_string_actions]
    return f"{parser.prog} has no option {unknown[0]}" if unknown else ""


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
