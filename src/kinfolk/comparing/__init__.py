"""Runs side by side: one table over methods and seeds."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kinfolk.comparing.runs import One, read_runs
from kinfolk.comparing.table import Comparison, differing, rows_of, tabulate

__all__ = ["Comparison", "compare"]


def compare(
    runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    base: str | None = None,
    oracle: str | None = None,
    figure: str | None = None,
    columns: Sequence[str] | None = None,
) -> Comparison:
    """One table over runs and seeds: mean ± deviation, a paired t-test against the base, the gap to the oracle.

    Runs of one method that differ only in their seed are a row; what else tells runs of a method apart is in the row's name, as in
    `simclr+glofnd (alpha 0.01)`. The test pairs runs of the same seed.

    Args:
        runs: a run folder or several, or folders that hold several; all of the same data, and evaluated.
        base: the row or method that all are compared with; by default each method's own framework, `simclr` for `simclr+glofnd`.
        oracle: the row or method that knows the labels; by default the base with `+oracle:attract` or `+oracle`, where there is one.
        figure: what the tests shown are of; by default `linear`, or what was measured first.
        columns: what the table shows, by the names above its columns; by default all. `records` hold everything in any case.

    Returns:
        The table, with `records`, `to_csv()`, `to_markdown()`, `to_latex()` and `save(path)`.
    """
    paths = [runs] if isinstance(runs, str | os.PathLike) else list(runs)
    found, notes = read_runs([os.fspath(path) for path in paths])
    rows = rows_of(found)
    return tabulate(rows, base, oracle, figure, columns, [*notes, *_unlike(rows)])


def _unlike(rows: dict[str, list[One]]) -> list[str]:
    """A note on settings, other than those of the method, that rows of different methods do not share."""
    keys = differing([runs[0].settings for runs in rows.values()])
    unlike = [key for key in keys if key.partition(".")[0] not in ("framework", "detector")]
    named = [key for key in unlike if not any(f"{key.rpartition('.')[2]} " in name.partition(" ")[2] for name in rows)]
    return [f"The methods were not trained alike: {', '.join(named)}."] if named else []
