"""The pictures in docs/pictures are those that bench/pictures.py draws from the repository as it is."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import demo_log
from bench.pictures import PICTURES, draw_architecture, draw_loss, rooms

README = Path(__file__).parents[2] / "README.md"
DEMO = Path(__file__).parents[2] / "docs" / "demo.md"
LOG = DEMO.read_text().partition("```text\n")[2].partition("```")[0]


def test_the_architecture_shows_the_rooms_as_they_are() -> None:
    assert (PICTURES / "architecture.svg").read_text() == draw_architecture(), "run `python -m bench.pictures`"


def test_the_loss_plot_shows_the_recorded_demo() -> None:
    demo = json.loads((PICTURES / "demo.json").read_text())
    assert (PICTURES / "loss.svg").read_text() == draw_loss(demo), "run `python -m bench.pictures`"


@pytest.mark.parametrize("name", ["architecture", "loss"])
def test_a_picture_is_well_formed_and_has_a_title(name: str) -> None:
    picture = ElementTree.parse(PICTURES / f"{name}.svg").getroot()
    assert picture.findtext("{http://www.w3.org/2000/svg}title")


def test_a_room_without_a_description_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.pictures.ROOMS", {"parallel": {"engines": "", "gone": ""}})
    with pytest.raises(ValueError, match="ROOMS of parallel must list its folders: analysis, gone missing or gone"):
        rooms("parallel")


def test_the_excerpt_in_the_readme_is_of_the_log() -> None:
    shown = README.read_text().partition("<!-- demo excerpt -->\n```text\n")[2].partition("```")[0]
    assert shown == demo_log.excerpt(LOG)
    assert len(shown.splitlines()) == 12


def test_a_new_log_replaces_only_the_block() -> None:
    page = DEMO.read_text()
    new = demo_log.put(page, "log", "new \\1\n")
    assert new == page.replace(LOG, "new \\1\n")
    with pytest.raises(ValueError, match="0 places called `demo other`"):
        demo_log.put(page, "other", "")


def test_the_date_of_a_log_is_taken_out() -> None:
    log = "make: ...\n\n== 1. A corpus\nin runs/demo-20261201-004754/corpus.jsonl\n"
    assert demo_log.clean(log) == "== 1. A corpus\nin runs/demo/corpus.jsonl\n"
    with pytest.raises(ValueError, match=re.escape("no line that begins with")):
        demo_log.excerpt(log)
