"""MkDocs hooks: generate the reference pages at build time, and point links that leave docs/ to the repository."""

import re
from pathlib import Path
from typing import Any, cast

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import api_pages
import notebook_page
import reference_pages

log = get_plugin_logger("hooks")

ROOT = Path(__file__).parents[2]
LINK_OUT = re.compile(r"\]\((?P<path>(?:\.\./)+[^)\s#]*)(?P<anchor>#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the API pages to the navigation, in the section Reference."""
    sections = cast(list[dict[str, Any]], config.nav)  # pyright: ignore[reportUnknownMemberType]
    reference = next(section["Reference"] for section in sections if "Reference" in section)
    reference.append({"API": list(api_pages.pages(ROOT))})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages to the site."""
    notebook = ROOT / "docs" / "notebooks" / "read_a_run.ipynb"
    generated = {
        **reference_pages.pages(ROOT),
        **api_pages.pages(ROOT),
        "notebooks/read_a_run.md": notebook_page.as_markdown(notebook),
    }
    for path, content in generated.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns each relative link that leaves docs/ into a link to the repository. Warns if its target does not exist."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def repository_link(link: re.Match[str]) -> str:
        target = (folder / link["path"]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return link[0]
        if not target.exists():
            log.warning("%s links to %s, which does not exist", page.file.src_uri, link["path"])
        kind = "tree" if target.is_dir() else "blob"
        return f"]({config.repo_url}/{kind}/main/{target.relative_to(ROOT)}{link['anchor'] or ''})"

    return LINK_OUT.sub(repository_link, markdown)
