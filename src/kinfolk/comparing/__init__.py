"""Compares runs: one table over methods and seeds."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kinfolk.comparing.runs import One, read_runs
from kinfolk.comparing.table import Comparison, differing, rows_of, tabulate
from kinfolk.training.load_run import FOREIGN

__all__ = ["Comparison", "compare"]


def compare(
    runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    base: str | None = None,
    oracle: str | None = None,
    figure: str | None = None,
    columns: Sequence[str] | None = None,
) -> Comparison:
    """One table over runs and seeds: mean ± deviation, paired tests against the base with
    confidence intervals, the gap to the oracle.

    Runs of one method that differ only in their seed form a row. Other settings in which runs of a
    method differ are in the row's name, as in `simclr+glofnd (alpha 0.01)`. Tests pair runs of the
    same seed; with several methods the p-values are corrected by Holm's method.

    Args:
        runs: one or several run folders, or folders that contain several; evaluated, and all on the
            same data.
        base: the row or method to compare with; by default each method's own framework, `simclr`
            for `simclr+glofnd`.
        oracle: the row or method that uses the labels; by default the base with `+oracle:attract`
            or `+oracle`, if there is one.
        figure: the figure for gains and tests; by default `linear`, or the first result.
        columns: the columns to show, by their headers; by default all. `records` always contain
            everything.

    Returns:
        The table, with `records`, `sentences()`, `to_csv()`, `to_markdown()`, `to_latex()`,
        `to_html()` and `save(path)`.
    """
    paths = [runs] if isinstance(runs, str | os.PathLike) else list(runs)
    found, notes = read_runs([os.fspath(path) for path in paths])
    rows = rows_of(found)
    return tabulate(rows, base, oracle, figure, columns, [*notes, *_unlike(rows)])


def _unlike(rows: dict[str, list[One]]) -> list[str]:
    """A note on settings other than the method's own in which the rows differ."""
    known = [runs[0].settings for runs in rows.values() if not (runs[0].path / FOREIGN).is_file()]
    keys = differing(known) if known else []
    unlike = [key for key in keys if key.partition(".")[0] not in ("framework", "detector")]
    named = [
        key
        for key in unlike
        if not any(f"{key.rpartition('.')[2]} " in name.partition(" ")[2] for name in rows)
    ]
    return (
        [f"The methods were not trained with the same settings: {', '.join(named)}."]
        if named
        else []
    )
