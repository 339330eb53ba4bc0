"""Statistics over seeds: mean and deviation, confidence intervals, paired t-tests with Holm's
correction, share of the gap to the oracle.

Figures are kept by row, one entry for each run. A row is a method, or a method with a setting in
brackets: `simclr+glofnd (alpha 0.01)`.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Container, Mapping, Sequence

Figures = Mapping[str, Sequence[Mapping[str, float]]]
"""Row name → the figures of each of its runs."""
LEVEL = 0.95
"""Of confidence intervals; a difference is significant if p is below 1 − LEVEL."""
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


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of the mean by Student's t distribution; None for fewer than two
    values.

    Example:
        >>> low, high = interval([4.0, 5.0, 6.0])
        >>> round(low, 2), round(high, 2)
        (2.52, 7.48)
    """
    if len(values) < 2:
        return None
    from scipy.stats import t

    mean = statistics.mean(values)
    half = (
        float(t.ppf((1 + LEVEL) / 2, len(values) - 1))
        * statistics.stdev(values)
        / math.sqrt(len(values))
    )
    return mean - half, mean + half


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """The p-values adjusted by Holm's method for the number of tests; None stays None and is not
    counted.

    Example:
        >>> holm([0.01, None, 0.04, 0.03])
        [0.03, None, 0.06, 0.06]
    """
    tested = sorted((p, at) for at, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, at) in enumerate(tested):
        largest = max(largest, min(1.0, p * (len(tested) - rank)))
        adjusted[at] = largest
    return adjusted


def p_value(
    ours: Sequence[float], base: Sequence[float], alternative: str = "greater"
) -> float | None:
    """Paired t-test over seeds: that the method is above its base, as in Tables 5 and 6 of the
    GloFND paper, or with "two-sided" that they differ. None for fewer than two pairs, for lists of
    different length, and where all differences are 0."""
    if len(ours) < 2 or len(ours) != len(base):
        return None
    from scipy.stats import ttest_rel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # raised where all differences are equal
        p = float(ttest_rel(ours, base, alternative=alternative).pvalue)
    return None if math.isnan(p) else p


def counterpart(name: str, method: str, rows: Container[str]) -> str | None:
    """The row of `method` with the same setting in brackets as `name`, or else without one; None if
    there is neither."""
    setting = name.partition(" ")[2]
    return next((row for row in (f"{method} {setting}".strip(), method) if row in rows), None)


def base_of(name: str, rows: Container[str], base: str | None = None) -> str | None:
    """The row that `name` is compared with: the row of `base`, or else of its framework alone; None
    for the base itself."""
    found = counterpart(name, base or name.partition(" ")[0].partition("+")[0], rows)
    return None if found == name else found


def oracle_of(
    name: str, rows: Container[str], base: str | None = None, kinds: Sequence[str] = SUPCON
) -> str | None:
    """The row of the base's method with the oracle: the first of `kinds` that exists."""
    method = (base_of(name, rows, base) or name).partition(" ")[0]
    return next(
        (row for kind in kinds if (row := counterpart(name, f"{method}+{kind}", rows)) is not None),
        None,
    )


def gap_closed(
    name: str,
    figures: Figures,
    base: str | None = None,
    figure: str = "linear",
    oracle: str | None = None,
) -> float | None:
    """(method − base) / (oracle − base), seeds averaged; None for the base, and where the oracle is
    missing or not above the base.

    `oracle` is the row of the oracle; by default SupCon, `base+oracle:attract`."""
    low, high = base_of(name, figures, base), oracle or oracle_of(name, figures, base)
    if low is None or high is None:
        return None
    values = [[run[figure] for run in figures[row] if figure in run] for row in (name, low, high)]
    if not all(values):
        return None
    ours, bottom, top = (statistics.mean(each) for each in values)
    return (ours - bottom) / (top - bottom) if top > bottom else None
