"""What several seeds say together: mean ± deviation, a paired test against the base, the share of the gap to the oracle that is closed.

Figures are kept by row, one entry for each run of it. A row is a method, or a method with a setting in brackets:
`simclr+glofnd (alpha 0.01)`.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Container, Mapping, Sequence

Figures = Mapping[str, Sequence[Mapping[str, float]]]
"""Row → the figures of each of its runs."""
SUPCON = ("oracle:attract",)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Mean ± standard deviation (n − 1), the mean alone of a single value, – of none.

    Example:
        >>> spread([50.0, 52.0]), spread([50.0]), spread([])
        ('51.0 ± 1.4', '50.0', '–')
    """
    if not values:
        return "–"
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def p_value(ours: Sequence[float], base: Sequence[float]) -> float | None:
    """One-sided paired t-test over seeds that the method is above its base, as in Tables 5 and 6 of the GloFND paper.

    None for fewer than two pairs, for lists of different length, and where the differences are all 0."""
    if len(ours) < 2 or len(ours) != len(base):
        return None
    from scipy.stats import ttest_rel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # differences that are all alike
        p = float(ttest_rel(ours, base, alternative="greater").pvalue)
    return None if math.isnan(p) else p


def counterpart(name: str, method: str, rows: Container[str]) -> str | None:
    """The row of `method` with the setting in brackets that `name` has, or else without one; None where there is neither."""
    setting = name.partition(" ")[2]
    return next((row for row in (f"{method} {setting}".strip(), method) if row in rows), None)


def base_of(name: str, rows: Container[str], base: str | None = None) -> str | None:
    """The row that `name` is compared with: that of `base`, or else of its framework alone; None for a base itself."""
    found = counterpart(name, base or name.partition(" ")[0].partition("+")[0], rows)
    return None if found == name else found


def oracle_of(name: str, rows: Container[str], base: str | None = None, kinds: Sequence[str] = SUPCON) -> str | None:
    """The row of the base's method with the oracle: the first of `kinds` that there is."""
    method = (base_of(name, rows, base) or name).partition(" ")[0]
    return next((row for kind in kinds if (row := counterpart(name, f"{method}+{kind}", rows)) is not None), None)


def gap_closed(name: str, figures: Figures, base: str | None = None, figure: str = "linear", oracle: str | None = None) -> float | None:
    """(method − base) / (oracle − base), seeds averaged; None for the base, and where the oracle is missing or not above it.

    `oracle`: its row; SupCon, `base+oracle:attract`, unless given."""
    low, high = base_of(name, figures, base), oracle or oracle_of(name, figures, base)
    if low is None or high is None:
        return None
    values = [[run[figure] for run in figures[row] if figure in run] for row in (name, low, high)]
    if not all(values):
        return None
    ours, bottom, top = (statistics.mean(each) for each in values)
    return (ours - bottom) / (top - bottom) if top > bottom else None
