"""The report as a page: what it holds, and what a browser draws of it without a network."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch import cli
from launch.report.attempts import attempts_of
from launch.report.page import page, script_json
from launch.report.run_data import figures_of, read_run
from launch.report.time_shares import time_shares
from tests.launch.report.conftest import write_run
from train.records.goodput import Span

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> & \u2028"
Make = Callable[..., Path]


class Texts(HTMLParser):
    """Collects the elements and the texts of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def report(out: Path, *runs: Path) -> str:
    assert cli.main(["report", *map(str, runs), "--out", str(out)]) == 0
    return out.read_text(encoding="utf-8")


def test_the_curve_of_the_page_is_that_of_the_run_as_it_is_now(tmp_path: Path, make_run: Make) -> None:
    run = read_run(make_run(tmp_path / "run"), "run")
    values = figures_of(run)
    assert values["steps"]["step"] == list(range(1, 61))
    assert max(values["steps"]["loss"]) < 10, "step 35 of the first attempt was replaced"
    assert values["evaluations"]["step"] == [10, 20, 30, 40, 50, 60]
    assert values["evaluations"]["tokens"] == [64 * step for step in (10, 20, 30, 40, 50, 60)]
    assert [(one["number"], one["words"]) for one in values["attempts"]] == [
        (1, "failed: out of memory"),
        (2, "finished"),
    ]
    assert values["saves"]["hours"] == [round(31 / 3600, 6)]
    json.loads(script_json(values), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_the_tables_name_causes_documents_costs_and_differences(tmp_path: Path, make_run: Make) -> None:
    runs = make_run(tmp_path / "a"), make_run(tmp_path / "b", lr=0.2)
    texts = Texts(report(tmp_path / "out.html", *runs)).texts
    assert texts.count("failed: out of memory") == 2
    assert f"keepstep data trace {runs[0]} --data-step 34" in texts
    assert "272 to 279" in texts
    assert "cpu (x86_64), torch 2" in texts
    place = texts.index("Differences of the recipes")
    assert [text for text in texts[place:] if text.strip()][4:7] == ["optim.lr", "0.1", "0.2"]
    assert "train.steps" not in texts
    assert {"12.3 kB", "0.5 s", "1.5 s", "node-1", "lost work"} <= set(texts)


def test_what_a_run_says_ends_no_element_and_starts_none(tmp_path: Path, make_run: Make) -> None:
    plain = Texts(report(tmp_path / "plain.html", make_run(tmp_path / "plain-run")))
    evil = make_run(tmp_path / "<script>alert(1)<" / "<img src=x>", words=EVIL)
    shown = Texts(report(tmp_path / "evil.html", evil))
    assert shown.elements == plain.elements
    assert any(EVIL in text for text in shown.texts), "it is shown as text"


def test_the_page_has_no_address_that_a_browser_would_load(tmp_path: Path, make_run: Make) -> None:
    text = report(tmp_path / "out.html", make_run(tmp_path / "run"))
    own = text[: text.index('<script type="application/json"')]
    assert "default-src &#x27;none&#x27;" in own
    assert not re.search(r"https?://|\bsrc=|<link", own)


@pytest.fixture(scope="module")
def chromium() -> str:
    found = shutil.which("chromium")
    if found is None and "CI" not in os.environ:
        pytest.skip("chromium is not installed")
    assert found, "CI installs chromium (.ci/run)"
    return found


def test_a_browser_without_network_draws_every_figure(chromium: str, tmp_path: Path, make_run: Make) -> None:
    runs = make_run(tmp_path / "a"), make_run(tmp_path / "<script>alert(1)<" / "<img src=x>", lr=0.2, words=EVIL)
    report(tmp_path / "out.html", *runs)
    argv = [
        chromium, "--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000", "--dump-dom",
        (tmp_path / "out.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=600)
    dom = Texts(done.stdout)
    drawn = re.search(r'<body data-figures="(\d+)">', done.stdout)
    assert drawn, "the page's script did not reach its end"
    assert 'id="failure"' not in done.stdout
    assert dom.elements.count("figure") == int(drawn[1]) == 13
    assert done.stdout.count('class="plot js-plotly-plot"') == 13
    assert "<title>owned" not in done.stdout
    assert "img" not in dom.elements, "a name became an element"


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.data())
def test_a_flipped_bit_never_stops_the_report(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.getbasetemp() / "flipped"
    if not folder.exists():
        write_run(folder)
    file = folder / data.draw(st.sampled_from(["metrics.jsonl", "events.jsonl", "recipe.yaml"]))
    original = file.read_bytes()
    content = bytearray(original)
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        file.write_bytes(content)
        Texts(page([read_run(folder, "run")]).split("<script", maxsplit=1)[0])
    finally:
        file.write_bytes(original)


def test_the_seconds_of_a_span_are_spread_over_the_time_that_it_took() -> None:
    shares = time_shares([Span(10.0, {"step": 10.0}), Span(20.0, {"down": 5.0, "step": 5.0})], windows=4)
    assert shares["shares"] == {"step": [1.0, 1.0, 0.5, 0.5], "down": [0.0, 0.0, 0.5, 0.5]}
    assert shares["hours"] == [round(seconds / 3600, 6) for seconds in (2.5, 7.5, 12.5, 17.5)]


def test_an_attempt_that_left_no_event_was_killed_and_a_hang_explains_the_failures_after_it() -> None:
    events = [
        {"kind": "started", "time": 10.0, "uptime": 1.0, "attempt": 1},
        {"kind": "booked", "time": 20.0, "uptime": 11.0},
        {"kind": "started", "time": 40.0, "uptime": 1.0, "attempt": 2},
        {"kind": "hang", "time": 50.0, "uptime": 11.0, "why": "rank 3 is behind"},
        {"kind": "failed", "time": 51.0, "uptime": 12.0, "error": "lost a peer"},
    ]
    first, second = attempts_of(events, last_write=60.0)
    assert (first.began, first.ended, first.words) == (9.0, 20.0, "no last event: killed, or lost")
    assert (second.ended, second.words) == (60.0, "hang: rank 3 is behind")
