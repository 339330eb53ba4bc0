"""report.html: what the template is told of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kinfolk.report import shell, words
from kinfolk.report.kin import Gallery
from kinfolk.report.map import EmbeddingMap
from kinfolk.report.plots import Panel
from kinfolk.report.record import Record
from kinfolk.report.stages import Stages
from kinfolk.report.views_grid import Strip

SECTIONS = (
    ("curves", "Training"),
    ("results", "Results"),
    ("gallery", "Kin"),
    ("retrieval", "Retrieval"),
    ("map", "Map"),
    ("stages", "Epochs"),
    ("views", "Views"),
    ("data", "Data"),
)


def render(
    record: Record,
    panels: Sequence[Panel],
    *,
    papers: Sequence[tuple[str, str]] = (),
    facts: Sequence[tuple[str, str]] = (),
    measured: Sequence[Panel] = (),
    levels: Sequence[Panel] = (),
    gallery: Gallery | None = None,
    gallery_missing: str = "",
    retrieval: str | None = None,
    embedding: EmbeddingMap | None = None,
    embedding_missing: str = "",
    stages: Stages | None = None,
    strips: Sequence[Strip] = (),
    num_views: int = 0,
) -> str:
    """The text of report.html. Panels without data are left out."""
    panels = [*panels, *levels]
    tables, refused, results = words.data_tables(record), words.quarantine(record), words.results(record)
    present: dict[str, Any] = {"curves": panels, "results": results or measured, "stages": stages, "views": strips}
    present["retrieval"] = retrieval
    present |= {"gallery": gallery or gallery_missing, "map": embedding or embedding_missing, "data": tables or refused}
    sprites = None if embedding is None else embedding.sprites
    return shell.compose(
        (shell.HERE, "page.html"),
        [(shell.HERE, "map.js"), (shell.HERE, "gallery.js")],
        data={
            "figures": {panel.id: panel.figure for panel in (*panels, *measured)},
            "points": None if embedding is None else embedding.as_json(),
            "gallery": None if gallery is None else gallery.as_json(),
            "stages": None if stages is None else stages.as_json(),
        },
        title=record.path.name,
        sections=[("run", "Run"), *((id, name) for id, name in SECTIONS if present[id]), ("config", "Configuration")],
        sheet=None if sprites is None else sprites.uri,
        name=record.path.name,
        method=str(record.config.get("method", "")),
        summary=words.summary(record),
        papers=papers,
        tiles=words.tiles(record),
        facts=facts,
        panels=panels,
        results=results,
        measured=measured,
        gallery=gallery,
        gallery_missing=gallery_missing,
        retrieval=retrieval,
        map=None if embedding is None else _caption(embedding, gallery is not None),
        map_missing=embedding_missing,
        stages=stages,
        strips=strips,
        num_views=num_views,
        splits=tables,
        quarantine=refused,
        config=words.configuration(record.config),
    )


def _caption(embedding: EmbeddingMap, linked: bool) -> str:
    count = len(embedding.keys)
    which = f"{count:,} samples" if count == embedding.total else f"{count:,} of {embedding.total:,} samples, drawn at random"
    colour = ", coloured by label" if embedding.labels is not None else ""
    kin = ", click to see its kin" if linked else ""
    return (
        f"{embedding.method} of the encoder's features for {which}{colour}. "
        f"Point at a sample to see its picture{kin}; drag to move, double-click to reset."
    )
