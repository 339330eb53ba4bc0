"""Composes an HTML page as one file that needs no network and no other file.

All text of the data is escaped by the template, scripts read JSON without angle brackets, and the
page's content security policy allows no other script and no request. A figure is a dictionary for
plotly.js with colours of the page's palette (`accent`, `second`, `third`)."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kinfolk.errors import without_controls
from kinfolk.files import write_text

if TYPE_CHECKING:
    from markupsafe import Markup


def write_page(
    path: Path,
    template: str,
    scripts: Sequence[str],
    *,
    data: Mapping[str, Any],
    title: str,
    sections: Sequence[tuple[str, str]],
    sheet: str | None = None,
    **words: Any,
) -> None:
    """`template` extends `report/shell.html`; `scripts` run after `shell.js` and read `data` by
    name. `sections`: ids and names for the bar at the top; `sheet`: data URI of the sprites."""
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    parts = [_file(name) for name in ("report/shell.js", *scripts)]
    early, script = _file("report/theme.js"), "\n".join([*parts, "page.start();\n"])
    plotly = get_plotlyjs()
    page = render_template(
        template,
        title=title,
        sections=sections,
        sheet=sheet,
        version=metadata.version("kinfolk"),
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        policy=policy(early, plotly, script),
        style=Markup(_file("report/page.css")),
        early=Markup(early),
        plotly=Markup(plotly),
        script=Markup(script),
        data={id: Markup(script_json(value)) for id, value in data.items() if value is not None},
        **words,
    )
    # lone surrogates of undecodable file names are replaced
    write_text(path, page.encode("utf-8", "replace").decode())


def render_template(template: str, **words: Any) -> Markup:
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FunctionLoader(_file),
        autoescape=True,
        finalize=without_controls,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["code"] = mark_code
    return Markup(environment.get_template(template).render(**words))


def mark_code(text: str) -> Markup:
    """What stands between backticks becomes code."""
    from markupsafe import Markup, escape

    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", str(escape(without_controls(text)))))


def script_json(value: Any) -> str:
    """No character in it can end the script element or open another."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def policy(*scripts: str) -> str:
    digests = (
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts
    )
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {allowed};"
        " base-uri 'none'; form-action 'none'"
    )


def _file(name: str) -> str:
    return resources.files("kinfolk").joinpath(name).read_text(encoding="utf-8")


# ---- figures

BINS = 60


@dataclass(frozen=True)
class Panel:
    """A figure with its heading and a description for screen readers."""

    id: str
    title: str
    note: str
    description: str
    figure: dict[str, Any]


def line(
    name: str, x: Iterable[Any], y: Iterable[Any], colour: str, dash: str = "solid", **more: Any
) -> dict[str, Any]:
    """Values that are not finite become gaps."""
    x, y = ([float(f"{value:.6g}") for value in values] for values in (x, y))
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": x,
        "y": [value if math.isfinite(value) else None for value in y],
        "line": {"color": colour, "width": 2, "dash": dash},
        "marker": {"color": colour, "size": 5},
        **more,
    }


def rounded(values: Iterable[Any], digits: int) -> list[float]:
    return [round(float(value), digits) for value in values]


def outlines(groups: Sequence[tuple[str, Any, str, str]]) -> list[dict[str, Any]]:
    """Histograms of several groups (name, finite values, colour, dash) as lines over the same bins,
    each normalised to its group."""
    whole = np.concatenate([values for _, values, _, _ in groups])
    edges = np.linspace(whole.min() - 1e-3, whole.max() + 1e-3, BINS + 1)
    traces = []
    for name, values, colour, dash in groups:
        share = np.histogram(values, bins=edges)[0] / len(values)
        traces.append(line(name, (edges[:-1] + edges[1:]) / 2, share, colour, dash))
        traces[-1]["line"]["shape"] = "hvh"
    return traces


def figure(traces: list[dict[str, Any]], axis: str, *, share: bool = False) -> dict[str, Any]:
    """With `share` the y axis is in percent."""
    layout: dict[str, Any] = {
        "height": 220,
        "margin": {"l": 52, "r": 12, "t": 8, "b": 34},
        "hovermode": "x unified",
        "showlegend": len(traces) > 1,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "xaxis": {"title": {"text": axis, "standoff": 4}, "showgrid": False, "nticks": 6},
        "yaxis": {"nticks": 5, "rangemode": "tozero", "tickformat": ".2~%" if share else "~g"},
    }
    return {"data": traces, "layout": layout}


# ---- curves over the epochs

COLOURS = ("accent", "second", "third")


@dataclass(frozen=True)
class Curve:
    """`lines` names each metric in the legend."""

    id: str
    title: str
    note: str
    lines: dict[str, str]
    percent: bool = False
    from_zero: bool = False


_percent = partial(Curve, percent=True)
_share = partial(Curve, percent=True, from_zero=True)
_from_zero = partial(Curve, from_zero=True)
CURVES = (
    Curve("loss", "Loss", "mean over the epoch", {"loss": "Loss"}),
    _percent("knn", "kNN accuracy", "weighted kNN on the encoder's features", {"knn": "kNN"}),
    _share("flagged", "Flagged pairs", "share of the negatives", {"flagged": "Flagged"}),
    _percent(
        "detection",
        "Detection",
        "flagged pairs against the labels",
        {"precision": "Precision", "recall": "Recall", "f1": "F1"},
    ),
    _percent(
        "anchor_detection",
        "Detection per anchor",
        "computed for each anchor, mean over the anchors",
        {"anchor_precision": "Precision", "anchor_recall": "Recall", "anchor_f1": "F1"},
    ),
    _percent(
        "clusters",
        "Clusters",
        "pseudo-labels of the first level against the labels",
        {"mtpr": "MTPR", "mtnr": "MTNR", "nmi": "NMI"},
    ),
    Curve(
        "similarity",
        "Similarity to the anchor",
        "of its positives, and of negatives with its label",
        {"tp_similarity": "True positives", "fn_similarity": "False negatives"},
    ),
    _percent(
        "features_nmi",
        "NMI of the features",
        "k-means on the encoder's features against the labels, mean over seeds",
        {"features_nmi": "NMI"},
    ),
    _percent(
        "hierarchy",
        "Hierarchy",
        "share of samples that conform to it, are clustered at its top level, and are in the"
        " largest cluster there",
        {"conforming": "Conforming", "clustered": "Clustered", "largest_cluster": "Largest"},
    ),
    _share(
        "keys",
        "Retrieved keys",
        "share of anchors with a key from the queue, and of these keys with the anchor's label",
        {"with_key": "Anchors with a key", "key_precision": "Same label"},
    ),
    _share(
        "accepted",
        "Accepted labels",
        "share of the samples whose cluster label is accepted, mean over the levels",
        {"accepted": "Accepted"},
    ),
    _from_zero("temperature", "Temperature", "of the loss", {"temperature": "Temperature"}),
    _from_zero("lr", "Learning rate", "at the end of the epoch", {"lr": "Learning rate"}),
    _from_zero(
        "cost",
        "Seconds of an epoch",
        "of the steps, and of embedding and clustering before them",
        {"seconds": "Steps", "refresh_seconds": "Refresh"},
    ),
)


def curve_panels(epochs: Sequence[dict[str, float]]) -> list[Panel]:
    panels = []
    for curve in CURVES:
        traces, described, drawn_epochs = [], [], set[int]()
        for (metric, label), colour in zip(curve.lines.items(), COLOURS, strict=False):
            rows = [row for row in epochs if math.isfinite(row.get(metric, math.nan))]
            if rows:
                x, y = [int(row["epoch"]) for row in rows], [row[metric] for row in rows]
                value = f"%{{y:{'.2%' if curve.percent else '.4~g'}}}"
                mode = "lines+markers" if len(x) <= 40 else "lines"
                traces.append(line(label, x, y, colour, mode=mode, hovertemplate=value))
                words = [f"{v:.1%}" if curve.percent else f"{v:.4g}" for v in (y[0], y[-1])]
                last = f", {words[1]} in epoch {x[-1]}" if len(x) > 1 else ""
                described.append(f"{label}: {words[0]} in epoch {x[0]}{last}")
                drawn_epochs.update((x[0], x[-1]))
        if traces:
            drawn, first = figure(traces, "epoch", share=curve.percent), min(drawn_epochs)
            step = max(1, math.ceil((max(drawn_epochs) - first) / 6))
            # ticks at whole epochs, also in short runs
            ticks = {"tickformat": "d", "tickmode": "linear", "tick0": first, "dtick": step}
            drawn["layout"]["showlegend"] = len(curve.lines) > 1
            drawn["layout"]["xaxis"] |= ticks
            if not curve.from_zero:
                drawn["layout"]["yaxis"]["rangemode"] = "normal"
            panels.append(Panel(curve.id, curve.title, curve.note, "; ".join(described), drawn))
    return panels
