"""Writes report.html into a run folder."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinfolk.report.facts import facts_of, papers_of
from kinfolk.report.figures import curve_panels
from kinfolk.report.map import choose
from kinfolk.report.material import draw_map, draw_strips
from kinfolk.report.page import render
from kinfolk.report.record import read_record
from kinfolk.report.views_grid import NUM_VIEWS
from kinfolk.training.opened import open_run

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kinfolk.data.images import ImageData


def write_report(
    run_dir: Path | str,
    data: ImageData | None = None,
    features: NDArray[np.float32] | None = None,
    *,
    progress: bool = False,
    tell: Callable[[str], object] | None = None,
) -> Path:
    """Writes RUN/report.html, one page that works from disk, and returns its path.

    What the run has no data for is left out: without the pictures or the model there is no map, and the page says why.

    Args:
        run_dir: the run folder.
        data: the run's pictures; None reads them again from the source in config.yaml.
        features: (N, F) the encoder's features of all samples of `data`; None embeds those of the map with the run's model.
        progress: shows bars while pictures are read and embedded.
        tell: is told why there is no map, where there is none.

    Example:
        >>> write_report("runs/photos")  # doctest: +SKIP
        PosixPath('runs/photos/report.html')
    """
    run = Path(run_dir)
    record = read_record(run)
    parts: dict[str, Any] = {}
    try:
        opened = open_run(run)
        data = opened.data(progress=progress) if data is None else data
        seed = opened.config.seed
        parts["strips"] = draw_strips(data, opened.views(), seed)
        ids = choose(len(data), seed)
        parts["embedding"] = draw_map(data, ids, opened.features(data, ids, progress=progress) if features is None else features[ids], seed)
    except (ValueError, OSError) as error:
        parts["embedding_missing"] = f"There is no map in this report: {str(error).rstrip('.')}."
        if tell is not None:
            tell(parts["embedding_missing"])
    page = render(
        record,
        curve_panels(record.epochs),
        papers=papers_of(record),
        facts=facts_of(record),
        num_views=NUM_VIEWS,
        version=metadata.version("kinfolk"),
        **parts,
    )
    path = run / "report.html"
    partial = path.with_name("report.html.partial")
    # A file name that is not valid Unicode reaches us with lone surrogates.
    partial.write_text(page, encoding="utf-8", errors="replace")
    partial.replace(path)
    return path
