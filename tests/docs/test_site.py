"""The documentation site builds without warnings and without network, and its reference pages are complete."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import recipe_page
import reference_pages
from launch import cli
from train.records.catalogue import EVENTS, METRICS

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
OUTSIDE = ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md", "slurm/README.md")
"""Pages that the site does not contain; GitHub shows them."""


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """Generated Markdown by page path."""
    return reference_pages.pages(ROOT)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", "docs/site/mkdocs.yml"]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env=os.environ | {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"},  # no network
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert not remote_files(tmp_path / "site")
    assert "Engine" in (tmp_path / "site" / "reference" / "api" / "parallel.html").read_text()


def remote_files(site: Path) -> set[str]:
    """Returns what the pages load from other hosts: scripts, style sheets, fonts and images."""
    sources = r"<(?:script|img|iframe)[^>]* src=\"?(https?:[^\" >]+)"
    sheets = r"<link[^>]* rel=\"?stylesheet[^>]* href=\"?(https?:[^\" >]+)"
    loaded = re.compile(f"{sources}|{sheets}")
    return {"".join(found) for page in site.rglob("*.html") for found in loaded.findall(page.read_text())}


def test_every_setting_has_a_row_with_its_meaning(pages: dict[str, str]) -> None:
    rows = {row.split("`")[1]: row for row in pages["reference/recipe.md"].splitlines() if row.startswith("| `")}
    for setting in recipe_page.settings():
        assert setting.field.description, f"{setting.name} has no docstring"
        assert setting.name in rows
    assert "| int, > 0 |  |" in rows["train.steps"]
    assert "`fsdp2`" in rows["parallel.engine"]
    page = pages["reference/recipe.md"]
    assert "A list; `data.sources.0` is its first item." in page
    assert "{#model-mup}\n\nMaximal update parametrization; null" in page, "a section that may be null is no list"


def test_rules_across_settings_are_listed(pages: dict[str, str]) -> None:
    assert "- `optim.warmup_steps` must be below `train.steps`." in pages["reference/recipe.md"]


def test_every_command_and_option_has_a_place(pages: dict[str, str]) -> None:
    page = pages["reference/cli.md"]
    for name in cli.COMMANDS:
        assert f"## keepstep {name} {{#keepstep-{name}}}" in page
    assert "### keepstep data build {#keepstep-data-build}" in page
    assert "`--dry-run`" in page


def test_exit_codes_events_and_metrics_are_listed(pages: dict[str, str]) -> None:
    for code in (
        "| 0 | `FINISHED` |",
        "| 1 | `FAILED` |",
        "| 2 | `FAILED_FOR_GOOD` |",
        "| 3 | `OUT_OF_MEMORY` |",
        "| 75 | `STOPPED` |",
    ):
        assert code in pages["reference/exit-codes.md"]
    assert "`ConfigError`" in pages["reference/exit-codes.md"]
    assert all(f"`{name}`" in pages["reference/events.md"] for name in EVENTS)
    assert all(f"`{name}`" in pages["reference/metrics.md"] for name in METRICS)


@pytest.mark.parametrize("name", OUTSIDE)
def test_relative_links_outside_the_site_lead_to_files(name: str) -> None:
    page = ROOT / name
    for link in LINK.finditer(page.read_text(encoding="utf-8")):
        target, _, anchor = link["target"].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = page.parent / target if target else page
        assert file.exists(), f"{name} links to {target}, which does not exist"
        assert not anchor or file.suffix != ".md" or anchor in anchors(file), f"{name} links to {link['target']}"


def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
