"""The page itself: one HTML file that needs nothing else, neither a network nor a neighbour on disk.

Every word of the run passes through the template's escaping; what the script reads is JSON without a single angle bracket; and the
page's own policy lets no other script run and nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import resources
from typing import Any

from kinfolk.report import words
from kinfolk.report.figures import Panel
from kinfolk.report.map import EmbeddingMap
from kinfolk.report.record import Record
from kinfolk.report.views_grid import Strip


def render(
    record: Record,
    panels: Sequence[Panel],
    *,
    papers: Sequence[tuple[str, str]] = (),
    facts: Sequence[tuple[str, str]] = (),
    embedding: EmbeddingMap | None = None,
    embedding_missing: str = "",
    strips: Sequence[Strip] = (),
    num_views: int = 0,
    version: str = "",
) -> str:
    """The text of report.html. Panels without data are left out."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    early, script, plotly = _file("theme.js"), _file("page.js"), get_plotlyjs()
    tables, refused, results = words.data_tables(record), words.quarantine(record), words.results(record)
    sections = [("run", "Run"), ("curves", "Training"), ("results", "Results"), ("map", "Map"), ("views", "Views"), ("data", "Data")]
    present = {"run": True, "curves": panels, "results": results, "map": embedding or embedding_missing, "views": strips}
    present["data"] = tables or refused
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True).from_string(_file("page.html"))
    return template.render(
        name=record.path.name,
        method=str(record.config.get("method", "")),
        summary=words.summary(record),
        sections=[(id, title) for id, title in sections if present[id]] + [("config", "Configuration")],
        papers=papers,
        tiles=words.tiles(record),
        facts=facts,
        panels=panels,
        results=results,
        map=None if embedding is None else {"caption": _caption(embedding), "sprites": embedding.sprites},
        map_missing=embedding_missing,
        strips=strips,
        num_views=num_views,
        splits=tables,
        quarantine=refused,
        config=words.configuration(record.config),
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        version=version,
        policy=policy(early, plotly, script),
        style=Markup(_file("page.css")),
        early=Markup(early),
        plotly=Markup(plotly),
        script=Markup(script),
        figures=Markup(script_json({panel.id: panel.figure for panel in panels})),
        points=Markup(script_json(None if embedding is None else embedding.as_json())),
    )


def script_json(value: Any) -> str:
    """JSON that can stand in a script element: no character in it can end the element or open another."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def policy(*scripts: str) -> str:
    """Content security policy: only these scripts, pictures inside the page, no network."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {allowed}; base-uri 'none'; form-action 'none'"


def _caption(embedding: EmbeddingMap) -> str:
    count = len(embedding.keys)
    which = f"{count:,} samples" if count == embedding.total else f"{count:,} of {embedding.total:,} samples, drawn at random"
    colour = ", coloured by label" if embedding.labels is not None else ""
    use = "Point at a sample to see its picture; drag to move, double-click to reset."
    return f"{embedding.method} of the encoder's features for {which}{colour}. {use}"


def _file(name: str) -> str:
    return resources.files("kinfolk.report").joinpath(name).read_text(encoding="utf-8")
