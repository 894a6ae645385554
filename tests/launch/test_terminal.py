import sys

import pytest

from launch import terminal


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.04804, "48 ms"),
        (0.25, "0.2 s"),
        (45.4, "45 s"),
        (725, "12 min 5 s"),
        (12_000, "3 h 20 min"),
        (187_200, "2 d 4 h"),
    ],
)
def test_a_duration_reads_as_people_say_it(seconds: float, text: str) -> None:
    assert terminal.duration(seconds) == text


def test_a_size_has_the_largest_unit_that_fits() -> None:
    assert [terminal.size(count) for count in (0, 999, 999.6, 1500, 2.5e9, 3e15)] == [
        "0 B",
        "999 B",
        "1 kB",
        "1.5 kB",
        "2.5 GB",
        "3e+03 TB",
    ]


def test_a_piped_table_has_no_colours_no_wrapping_and_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 300
    terminal.print_table(["name", ">count"], [["[red]plain[/red]", "1"], [long, "12345"]])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("[red]plain[/red]")
    assert lines[1].rstrip().endswith(" 1")
    assert long in lines[2]
    assert "\x1b" not in "".join(lines)


def test_progress_without_a_terminal_is_whole_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "PLAIN_SECONDS", 0.0)
    assert not sys.stderr.isatty()
    with terminal.progress("reading", 4e6, "bytes") as advance:
        advance(1e6)
    line = capsys.readouterr().err
    assert line.startswith("reading: 1 MB of 4 MB (25%), ")
    assert line.endswith(" left\n")


def test_a_progress_line_has_rate_and_time_left() -> None:
    line = terminal.progress_line("verifying", 30, 90, "files", 10.0)
    assert line == "verifying: 30 files of 90 files (33%), 3 files/s, 20 s left"
