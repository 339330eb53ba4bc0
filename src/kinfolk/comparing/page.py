"""compare.html: the comparison of runs as a page with the confidence intervals drawn."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kinfolk.report import html
from kinfolk.report.curves import Panel, figure

if TYPE_CHECKING:
    from kinfolk.comparing.table import Comparison


def render(comparison: Comparison, rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """The text of the page. `rows` are the method and the cells of each row of the table."""
    panels = [*_gain_panel(comparison), _value_panel(comparison)]
    return html.compose(
        ("kinfolk.comparing", "compare.html"),
        [],
        data={"figures": {panel.id: panel.figure for panel in panels}},
        title="Comparison",
        sections=[("comparison", "Comparison"), ("intervals", "Intervals"), ("table", "Table")],
        sentences=[_minus(sentence) for sentence in comparison.sentences()],
        panels=panels,
        heads=[column.head for column in comparison.columns],
        rows=[(method, [_minus(cell) for cell in cells]) for method, cells in rows],
        caption=caption(comparison),
        notes=comparison.notes,
        figure=_words(comparison.figure),
    )


def _minus(text: str) -> str:
    """A text with minus signs instead of hyphens before numbers."""
    return re.sub(r"(?<![\w-])-(?=\d)", "−", text)


def _words(figure: str) -> str:
    return {"linear": "linear probe", "knn": "kNN accuracy"}.get(figure, figure)


def caption(comparison: Comparison) -> str:
    """What the numbers of the table are."""
    numbers = {len(record["seeds"]) for record in comparison.records}
    seeds = "seeds" if len(numbers) > 1 else f"{max(numbers)} seeds"
    text = "One seed each, in percent" if numbers == {1} else f"Mean ± standard deviation over {seeds}, in percent"
    kinds = {column.kind for column in comparison.columns if column.section == "tests"}
    explained = {
        "gain": "gain is method − base, so + is better",
        "gain_low": "the interval is the 95% confidence interval of the gain",
        "pairs": "n is the number of seeds that both have",
        "p": "p is of a two-sided paired t-test",
        "p_holm": "p (Holm) is corrected for the number of methods",
        "to_oracle": f"to oracle is method − oracle ({_oracles(comparison)}), so − is below it",
    }
    used = [words for kind, words in explained.items() if kind in kinds]
    return f"{text}." + (f" Tests are of {comparison.figure}: {'; '.join(used)}." if used else "")


def _oracles(comparison: Comparison) -> str:
    return " or ".join(sorted({record["oracle"] for record in comparison.records} - {None}))


def _gain_panel(comparison: Comparison) -> list[Panel]:
    key = comparison.figure
    compared = [record for record in comparison.records if record[f"{key}_gain"] is not None]
    if not compared:
        return []
    halves = [_half(record, f"{key}_gain_low", f"{key}_gain_high") for record in compared]
    drawn = _points([record["method"] for record in compared], [record[f"{key}_gain"] for record in compared], halves, "points")
    drawn["layout"]["shapes"] = [
        {"type": "line", "x0": 0, "x1": 0, "y0": 0, "y1": 1, "yref": "paper", "line": {"width": 1, "dash": "dot", "color": "#888888"}}
    ]
    note = "difference to the base with its 95% confidence interval; an interval that contains 0 is not significant"
    return [Panel("gain", f"Gain: {_words(key)}", note, " ".join(comparison.sentences()), drawn)]


def _value_panel(comparison: Comparison) -> Panel:
    key = comparison.figure
    present = [record for record in comparison.records if record[key] is not None]
    halves = [_half(record, f"{key}_low", f"{key}_high") for record in present]
    drawn = _points([record["method"] for record in present], [record[key] for record in present], halves, "percent")
    described = "; ".join(f"{record['method']} {record[key]:.1f}" for record in present)
    return Panel("value", _words(key)[:1].upper() + _words(key)[1:], "mean over seeds with its 95% confidence interval", described, drawn)


def _half(record: Mapping[str, Any], low: str, high: str) -> float:
    return 0.0 if record[low] is None else (record[high] - record[low]) / 2


def _points(names: Sequence[str], values: Sequence[float], halves: Sequence[float], axis: str) -> dict[str, Any]:
    """One point with its interval in each row, the first row at the top."""
    labels = [name if len(name) <= 34 else f"{name[:33]}…" for name in names]
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": [round(value, 4) for value in values],
        "y": list(range(len(names))),
        "customdata": [[half] for half in halves],
        "hovertemplate": "%{x:.2f} ± %{customdata[0]:.2f}<extra></extra>",
        "marker": {"color": "accent", "size": 10},
        "line": {"color": "accent"},
        "error_x": {"type": "data", "array": [round(half, 4) for half in halves], "color": "accent", "thickness": 2, "width": 6},
    }
    drawn = figure([trace], axis)
    drawn["layout"] |= {"height": 110 + 34 * len(names), "hovermode": "closest"}
    drawn["layout"]["xaxis"]["showgrid"] = True
    drawn["layout"]["yaxis"] = {
        "tickvals": list(range(len(names))),
        "ticktext": labels,
        "range": [len(names) - 0.4, -0.6],
        "showgrid": False,
    }
    return drawn
