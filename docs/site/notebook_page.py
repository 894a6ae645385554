"""Shows a notebook as a page of the site. Needs no Jupyter."""

import json
from pathlib import Path


def as_markdown(notebook: Path) -> str:
    """Returns the notebook's text cells as Markdown and its code cells as fenced blocks, without outputs."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(_cell(cell["cell_type"], "".join(cell["source"])) for cell in cells) + "\n"


def _cell(kind: str, source: str) -> str:
    return f"```python\n{source}\n```" if kind == "code" else source
