"""The report as one HTML file that needs no network: plotly's script, the page's own, and the values of the runs.

Everything that comes from a run is text that anyone may have written. It enters the page as escaped HTML, or as JSON
without the characters that could end the script element. The page's policy refuses every request."""

import html
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.report.run_data import RunData, figures_of
from launch.report.tables import difference_table, event_tables, summary_table
from train.errors import ConfigError

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#figures">Skip to the figures</a>
<header><h1>{title}</h1><p>{subtitle}</p></header>
<main>
<section aria-label="Summary">{summary}</section>
<form id="controls" aria-label="Figures">
<label>x axis <select id="axis"><option value="step">steps</option><option value="tokens">tokens</option>
<option value="hours">time</option></select></label>
<label>y axis <select id="scale"><option value="linear">linear</option><option value="log">log</option></select></label>
<label>smoothing <input id="smoothing" type="range" min="0" max="0.99" step="0.01" value="0">
<output id="smoothed" for="smoothing">0</output></label>
<fieldset id="runs"><legend>runs</legend></fieldset>
</form>
<div id="figures"></div>
{tables}
</main>
<script type="application/json" id="values">{values}</script>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


def page(runs: Sequence[RunData]) -> str:
    """Return the page that shows the runs, over each other."""
    names = ", ".join(run.name for run in runs)
    here = Path(__file__).parent
    return _PAGE.format(
        policy=html.escape(_POLICY),
        title=html.escape(f"Keepstep report: {names}"),
        subtitle=html.escape(" · ".join(str(run.path) for run in runs)),
        style=(here / "page.css").read_text(encoding="utf-8"),
        summary=summary_table(runs),
        tables="\n".join([difference_table(runs), *event_tables(runs)]),
        values=script_json([figures_of(run) for run in runs]),
        plotly=_plotly(),
        script=(here / "page.js").read_text(encoding="utf-8"),
    )


def script_json(value: Any) -> str:
    """Return JSON that is safe within a script element, whatever its texts are."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plotly() -> str:
    """Return plotly's script. The package is found and not imported, which would take a second."""
    found = importlib.util.find_spec("plotly")
    if found is None or found.origin is None:
        raise ConfigError("the report needs plotly, which is not installed; `pip install plotly`, or use --text")
    return (Path(found.origin).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
