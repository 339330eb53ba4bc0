"""Writes report.html into a run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kinfolk.files import first_line
from kinfolk.report import record as texts
from kinfolk.report.gallery import (
    Gallery,
    bounds_of,
    build_gallery,
    draw_retrieval,
    embed_samples,
    level_panels,
)
from kinfolk.report.html import Panel, curve_panels, write_page
from kinfolk.report.maps import NUM_VIEWS, EmbeddingMap, choose, draw_map, draw_strips
from kinfolk.report.record import Record, read_record
from kinfolk.report.results import result_rows
from kinfolk.training.load_run import open_run, restore

if TYPE_CHECKING:
    from markupsafe import Markup
    from numpy.typing import NDArray

    from kinfolk.data.images import ImageData
    from kinfolk.frameworks import Framework

    Known = tuple[NDArray[np.int64], NDArray[np.float32]]

COSTS = ("lr", "cost")


@dataclass
class Drawn:
    """What a report shows besides the small files of its run, or why not."""

    strips: Sequence[dict[str, Any]] = ()
    map: EmbeddingMap | None = None
    map_missing: str = ""
    levels: Sequence[Panel] = ()
    gallery: Gallery | None = None
    gallery_missing: str = ""
    retrieval: Markup | None = None


def write_report(
    run_dir: Path | str,
    data: ImageData | None = None,
    features: Known | None = None,
    framework: Framework | None = None,
    *,
    progress: bool = False,
    on_missing: Callable[[str], object] | None = None,
) -> Path:
    """Writes RUN/report.html, one page that works from disk, and returns its path.

    Without the images or the model there is no map, and without a checkpoint there is no gallery of
    kin. The page then gives the reason.

    Args:
        data: the run's images; None reads them from the source in config.yaml.
        features: ids of samples of `data`, ascending, and the encoder's features of these samples
            (M, F). The run's model embeds the other samples of the map.
        framework: the trained method in evaluation mode; None: that of the last checkpoint.
        on_missing: called with the reason if there is no map or no gallery.
    """
    run = Path(run_dir)
    record, drawn = read_record(run), Drawn()
    try:
        _draw(drawn, run, data, features, framework, progress)
    # RuntimeError: torch, for a checkpoint of another version
    except (ValueError, OSError, RuntimeError) as error:
        why = f"in this report: {first_line(error)}."
        if drawn.map is None:
            drawn.map_missing = f"There is no map {why}"
        else:
            drawn.gallery_missing = f"There is no gallery of kin {why}"
    for reason in filter(None, (drawn.map_missing, drawn.gallery_missing)):
        if on_missing is not None:
            on_missing(reason)
    path = run / "report.html"
    _write(path, record, drawn)
    return path


def _draw(
    drawn: Drawn,
    run: Path,
    data: ImageData | None,
    features: Known | None,
    framework: Framework | None,
    progress: bool,
) -> None:
    opened = open_run(run)
    config, seed = opened.config, opened.config.seed
    data = opened.data(progress=progress) if data is None else data
    if data.texts is None:
        drawn.strips = draw_strips(data, opened.views(), seed)
    ids = choose(len(data), seed)
    features_NF = add_missing(
        features, ids, lambda missing: opened.features(data, missing, progress=progress)
    )
    drawn.map = draw_map(data, ids, features_NF, seed)
    if framework is None and "text" in opened.modalities:
        drawn.retrieval = draw_retrieval(opened, data, progress=progress)
        return
    framework = restore(opened.path, config, data) if framework is None else framework
    compared = embed_samples(framework, data, opened.views(), ids, seed, progress=progress)
    bounds = bounds_of(compared)
    learned = bounds[0].learned if bounds and bounds[0].name == "threshold" else None
    drawn.levels = level_panels(compared, config.batch_size, seed)
    drawn.gallery = build_gallery(compared, data.labels, learned)


def add_missing(
    known: Known | None,
    ids: NDArray[np.int64],
    compute: Callable[[NDArray[np.int64]], NDArray[np.float32]],
) -> NDArray[np.float32]:
    """(N, F) features of `ids`: the `known` ones, and what `compute` returns for the others."""
    if known is None or not len(known[0]):
        return compute(ids)
    known_ids, known_MF = known
    place = np.searchsorted(known_ids, ids).clip(max=len(known_ids) - 1)
    missing = known_ids[place] != ids
    features_NF: NDArray[np.float32] = known_MF[place]
    if missing.any():
        features_NF[missing] = compute(ids[missing])
    return features_NF


def _write(path: Path, record: Record, drawn: Drawn) -> None:
    curves = curve_panels(record.epochs)
    gallery, embedding = drawn.gallery, drawn.map
    costs = [panel for panel in curves if panel.id in COSTS]
    panels = [*(panel for panel in curves if panel not in costs), *drawn.levels, *costs]
    results = result_rows(record.results)
    without_detector = gallery is not None and gallery.flagged is None
    present: dict[str, tuple[str, Any]] = {
        "run": ("Run", True),
        "curves": ("Training", panels),
        "results": ("Results", results),
        "gallery": ("Neighbours" if without_detector else "Kin", gallery or drawn.gallery_missing),
        "retrieval": ("Retrieval", drawn.retrieval),
        "map": ("Map", embedding or drawn.map_missing),
        "views": ("Views", drawn.strips),
        "config": ("Configuration", True),
    }
    sprites = None if embedding is None else embedding.sprites
    write_page(
        path,
        "report/page.html",
        ["report/map.js", "report/gallery.js"],
        data={
            "figures": {panel.id: panel.figure for panel in panels},
            "points": None if embedding is None else embedding.as_json(),
            "gallery": None if gallery is None else gallery.as_json(),
        },
        title=record.path.name,
        sections=[(id, name) for id, (name, contents) in present.items() if contents],
        sheet=None if sprites is None else sprites.uri,
        name=record.path.name,
        method=record.method,
        summary=texts.describe_training(record),
        tiles=texts.tiles(record),
        facts=texts.facts_of(record),
        panels=panels,
        results=results,
        drawn=drawn,
        num_views=NUM_VIEWS,
        config=texts.configuration(record.config),
    )
