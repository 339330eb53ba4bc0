"""Writes report.html into a run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kinfolk.data.sample_table import Samples, key_difference, samples_digest
from kinfolk.files import first_line
from kinfolk.report import html
from kinfolk.report import record as texts
from kinfolk.report.gallery import (
    Gallery,
    bounds_of,
    draw_retrieval,
    embed_samples,
    find_kin,
    level_panels,
)
from kinfolk.report.html import Panel, curve_panels, write_page
from kinfolk.report.maps import (
    NUM_VIEWS,
    EmbeddingMap,
    Stages,
    Strip,
    choose,
    draw_map,
    draw_stages,
    draw_strips,
)
from kinfolk.report.record import Record, fraction_panels, read_record
from kinfolk.training.epoch_end import read_snapshots
from kinfolk.training.load_run import OpenedRun, open_run, restore
from kinfolk.training.run_folder import Run

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kinfolk.data.images import ImageData
    from kinfolk.frameworks import Framework


COSTS = ("lr", "speed", "cost")
"""Panels that come last."""


def render_report(
    record: Record,
    *,
    levels: Sequence[Panel] = (),
    gallery: Gallery | None = None,
    gallery_missing: str = "",
    retrieval: str | None = None,
    embedding: EmbeddingMap | None = None,
    embedding_missing: str = "",
    stages: Stages | None = None,
    strips: Sequence[Strip] = (),
) -> str:
    """The text of report.html. Sections without data are left out."""
    curves = curve_panels(record.epochs, record.labelled)
    costs = [panel for panel in curves if panel.id in COSTS]
    panels = [*(panel for panel in curves if panel not in costs), *levels, *costs]
    measured, results = fraction_panels(record.results), texts.results(record)
    without_detector = gallery is not None and gallery.flagged is None
    present: dict[str, tuple[str, Any]] = {
        "curves": ("Training", panels),
        "results": ("Results", results or measured),
        "gallery": ("Neighbours" if without_detector else "Kin", gallery or gallery_missing),
        "retrieval": ("Retrieval", retrieval),
        "map": ("Map", embedding or embedding_missing),
        "stages": ("Epochs", stages),
        "views": ("Views", strips),
    }
    sections = [(id, name) for id, (name, contents) in present.items() if contents]
    sprites = None if embedding is None else embedding.sprites
    return html.compose(
        "report/page.html",
        ["report/map.js", "report/gallery.js"],
        data={
            "figures": {panel.id: panel.figure for panel in (*panels, *measured)},
            "points": None if embedding is None else embedding.as_json(),
            "gallery": None if gallery is None else gallery.as_json(),
            "stages": None if stages is None else stages.as_json(),
        },
        title=record.path.name,
        sections=[("run", "Run"), *sections, ("config", "Configuration")],
        sheet=None if sprites is None else sprites.uri,
        name=record.path.name,
        method=record.method,
        summary=texts.describe_training(record),
        papers=texts.papers_of(record),
        tiles=texts.tiles(record),
        facts=texts.facts_of(record),
        panels=panels,
        results=results,
        measured=measured,
        gallery=gallery,
        gallery_missing=gallery_missing,
        retrieval=retrieval,
        map=embedding,
        map_missing=embedding_missing,
        stages=stages,
        strips=strips,
        num_views=NUM_VIEWS,
        config=texts.configuration(record.config, record.labelled),
    )


def write_report(
    run_dir: Path | str,
    data: ImageData | None = None,
    features: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None,
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
    record = read_record(run)
    parts: dict[str, Any] = {}
    try:
        opened = open_run(run)
        data = opened.data(progress=progress) if data is None else data
        ids = _draw_images(opened, data, features, parts, progress)
    except (ValueError, OSError) as error:
        parts["embedding_missing"] = f"There is no map in this report: {first_line(error)}."
    else:
        try:
            if framework is None and "text" in opened.modalities:
                parts["retrieval"] = draw_retrieval(opened, data, progress=progress)
            else:
                _draw_kin(opened, data, ids, framework, parts, progress)
        # RuntimeError: torch, for a checkpoint of another version
        except (ValueError, OSError, RuntimeError) as error:
            parts["gallery_missing"] = (
                f"There is no gallery of kin in this report: {first_line(error)}."
            )
    for missing in ("embedding_missing", "gallery_missing"):
        if on_missing is not None and missing in parts:
            on_missing(parts[missing])
    path = run / "report.html"
    write_page(path, render_report(record, **parts))
    return path


def _draw_images(
    opened: OpenedRun,
    data: ImageData,
    features: tuple[NDArray[np.int64], NDArray[np.float32]] | None,
    parts: dict[str, Any],
    progress: bool,
) -> NDArray[np.int64]:
    """Draws the views, the map and the maps of several epochs; returns the ids of the samples on
    the map."""
    seed = opened.config.seed
    if data.texts is None:
        parts["strips"] = draw_strips(data, opened.views(), seed)
    digest = _samples_digest(opened, data)
    snapshots = [] if digest is None else read_snapshots(Run(opened.path).snapshots, digest)
    ids = choose(len(data), seed, include=snapshots[0].ids if snapshots else None)
    features_NF = add_missing(
        features, ids, lambda missing: opened.features(data, missing, progress=progress)
    )
    parts["embedding"] = draw_map(data, ids, features_NF, seed)
    parts["stages"] = draw_stages(snapshots, ids, data.labels is not None, seed)
    return ids


def add_missing(
    known: tuple[NDArray[np.int64], NDArray[np.float32]] | None,
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


def _draw_kin(
    opened: OpenedRun,
    data: ImageData,
    ids: NDArray[np.int64],
    framework: Framework | None,
    parts: dict[str, Any],
    progress: bool,
) -> None:
    """Draws the gallery of kin and the thresholds of its samples."""
    config = opened.config
    framework = restore(opened.path, config, data) if framework is None else framework
    compared = embed_samples(framework, data, opened.views(), ids, config.seed, progress=progress)
    bounds = bounds_of(compared)
    learned = bounds[0].learned if bounds and bounds[0].name == "threshold" else None
    parts["levels"] = level_panels(compared, config.batch_size, config.seed)
    parts["gallery"] = find_kin(compared, data.labels, learned)


def _samples_digest(opened: OpenedRun, data: ImageData) -> str | None:
    """Digest of the run's samples if `data` are its training samples, to which its snapshots
    belong; else None."""
    file = Run(opened.path).samples
    if not file.is_file():
        return None
    recorded = Samples.read(file)
    same = (
        key_difference(recorded.keys[: recorded.num_train], data.samples.keys[: data.num_train])
        is None
    )
    return samples_digest(recorded) if same else None
