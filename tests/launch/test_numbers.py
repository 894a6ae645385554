"""Every numeric option of every command refuses what it cannot use, in one line and with exit code 2."""

import argparse
from collections.abc import Iterator

import pytest

from launch.cli import COMMANDS, command_parser, main
from launch.numbers import number, whole
from train.errors import ConfigError


def parsers(name: str) -> Iterator[tuple[list[str], argparse.ArgumentParser]]:
    """Yield the parser of a command and those of its subcommands, with the words that lead there."""

    def below(words: list[str], parser: argparse.ArgumentParser) -> Iterator[tuple[list[str], argparse.ArgumentParser]]:
        yield words, parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for word, sub in action.choices.items():
                    yield from below([*words, word], sub)

    yield from below([name], command_parser(name))


OPTIONS = [
    (words, action)
    for name in COMMANDS
    for words, parser in parsers(name)
    for action in parser._actions
    if action.option_strings and getattr(action.type, "__module__", "") == "launch.numbers"
]


def test_no_option_reads_a_number_without_bounds() -> None:
    plain = [
        (*words, *action.option_strings)
        for name in COMMANDS
        for words, parser in parsers(name)
        for action in parser._actions
        if action.type in (int, float)
    ]
    assert plain == []
    assert len(OPTIONS) > 30


@pytest.mark.parametrize("value", ["nan", "inf", "-3", "1e400", "99999999999999999999", "banana", ""])
@pytest.mark.parametrize(("words", "action"), OPTIONS, ids=lambda value: getattr(value, "dest", None))
def test_a_bad_number_is_refused_in_one_line(
    words: list[str], action: argparse.Action, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    option = action.option_strings[0]
    assert main([*words, f"{option}={value}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"keepstep: {option} ({value}) must be ")
    assert error.count("\n") == 1


def test_the_bounds_belong_to_the_range() -> None:
    assert [whole("--n", 1, 4)(text) for text in ("1", "4")] == [1, 4]
    assert [number("--x", 0, 1)(text) for text in ("0", "1", "1e-3")] == [0.0, 1.0, 1e-3]
    with pytest.raises(ConfigError, match=r"--n \(0\) must be at least 1"):
        whole("--n", 1, 4)("0")
    with pytest.raises(ConfigError, match=r"--n \(5\) must be at most 4"):
        whole("--n", 1, 4)("5")
    with pytest.raises(ConfigError, match=r"--x \(1\.5\) must be a number from 0 to 1"):
        number("--x", 0, 1)("1.5")
