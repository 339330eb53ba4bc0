"""Tables and figures of docs/results.md, made from the files of results alone.

    .venv/bin/python benchmarks/study_figures.py [--page docs/results.md] [--images docs/images]
    .venv/bin/python benchmarks/study_figures.py benchmarks/results/ifnd-figure1.json --classes benchmarks/studies/ifnd-figure1.yaml

Prints one Markdown table for each data set of each study; with `--page` they replace what stands in
that page between `<!-- table NAME -->` and `<!-- end -->`: NAME is the data set for `gain.json`,
`long DATASET` for `long.json`, `good DATASET` for `good_encoder.json`, `text DATASET` for the
records of `text.py` in `results/text/`. `<!-- table claims -->` is
the table of claims of `claims.yaml`, whose measured cells and verdicts come from the records. What
has no record yet is said to be not run.

With `--images` it draws `gain-precision.svg` (the gain of each detector by its precision, over all
studies), `gain-map.svg` and `gain-epochs.svg` by plotly; Chromium turns them into SVG, so
`chromium` (or google-chrome) must be on the PATH. With `--classes` it draws `gap-classes.svg`
instead, Figure 1 of IFND: what each method reaches on data sets with more and more classes, by the
numbers of `classes` in the document of the study.
"""  # noqa: E501

from __future__ import annotations

import argparse
import html
import json
import re
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import text as text_contest
import yaml
from study import format_spread, gap_closed

from kinfolk.comparing.table import p_value

BASE, ELIMINATED, ATTRACTED = "simclr", "simclr+oracle", "simclr+oracle:attract"
ACTIONS = {"eliminate": "Eliminate", "attract": "Attract"}
SCALE = [[0, "#b2182b"], [0.25, "#ef8a62"], [0.5, "#f7f7f7"], [0.75, "#67a9cf"], [1, "#2166ac"]]
INK, GRID = "#24292f", "#d8dee4"
VARIANTS = ("(late)", "(second head)")
"""Rows that stand where the method itself stands, and are left out of the map."""
Record = Mapping[str, Any]
Rows = Mapping[str, Mapping[int, Record]]
"""Method → seed → record."""
HERE = Path(__file__).parent
REGIMES = {
    "long": "from scratch, 100 epochs",
    "good_encoder": "from a good encoder",
    "gain": "from scratch, 6 to 16 epochs",
    "ifnd-figure1": "from scratch, 30 epochs",
    "spcl-batches": "from scratch, 50 epochs",
    "text": "fine-tuned",
}
"""What the trainings of each file of results are."""
PREFIXES = {"gain": "", "long": "long ", "good_encoder": "good "}
"""Of the names of their tables on the page."""
NAMES = {
    "gtsrb": "GTSRB",
    "gtsrb1024": "GTSRB",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "tinyimagenet15": "Tiny-ImageNet-15",
    "banking77": "banking77 (sentences)",
    "clinc150": "clinc150 (sentences)",
}
OWN = (
    *("fnc", "glofnd", "ifnd", "neighbours", "hierarchy", "components", "ring", "cave"),
    "positive_margin",
)
"""Detectors that go by the encoder's own similarity."""
VERDICTS = ("reproduced", "same sign", "not seen")
CRITERIA = {
    "views": "views: nearest view is of the same image",
    "tracks": "tracks: nearest image is of the same track",
    "nearest": "by the labels: precision of the ten nearest",
}
"""What `kinfolk advise --try` compares methods by, and a figure by the labels to compare with."""


def read(path: Path) -> dict[str, dict[str, dict[int, Record]]]:
    """Data set → method → seed → record. Detectors of `good_encoder.json` are those of `simclr`."""
    found: dict[str, dict[str, dict[int, Record]]] = {}
    bare = path.stem == "good_encoder"
    for one in json.loads(path.read_text(encoding="utf-8")):
        if "figures" not in one:  # the choice of a setting
            continue
        name = one["method"]
        name = f"{BASE}+{name}" if bare and name not in (BASE, "frozen", "distillation") else name
        found.setdefault(one["dataset"], {}).setdefault(name, {})[one["seed"]] = one
    return found


def read_text(folder: Path) -> dict[str, dict[str, dict[int, Record]]]:
    """The records of `text.py`, with the names of the other studies: its loss without a detector,
    `plain`, is the base."""
    found: dict[str, dict[str, dict[int, Record]]] = {}
    for path in sorted(folder.glob("*/*.json")):
        one = json.loads(path.read_text(encoding="utf-8"))
        if one["stage"] == "choose":
            continue
        name = BASE if one["method"] == "plain" else f"{BASE}+{one['method']}"
        shares = {
            key: 100 * one[key] for key in ("precision", "recall") if one.get(key) is not None
        }
        record = {"figures": {"knn": one["knn"], **shares}}
        found.setdefault(one["data"], {}).setdefault(name, {})[one["seed"]] = record
    return found


def paired(
    rows: Mapping[str, Mapping[int, Record]], method: str, other: str, figure: str
) -> tuple[list[float], list[float]]:
    """The figure of both methods for the seeds that both have."""
    seeds = sorted(rows[method].keys() & rows.get(other, {}).keys())
    return [rows[method][seed]["figures"][figure] for seed in seeds], [
        rows[other][seed]["figures"][figure] for seed in seeds
    ]


def over_common_seeds(rows: Rows, *methods: str) -> dict[str, list[Record]]:
    """The records of the methods for the seeds that all of them have. If that is one seed or none,
    all their records: one run of the base would be a poor reference."""
    common = set.intersection(*(set(rows.get(name, {})) for name in methods))
    return {
        name: [one for seed, one in rows.get(name, {}).items() if len(common) < 2 or seed in common]
        for name in methods
    }


def gain(rows: Rows, method: str, figure: str) -> float | None:
    """Difference of the mean to that of the base, over the seeds that both have."""
    runs = over_common_seeds(rows, method, BASE)
    ours, base = ([one["figures"][figure] for one in runs[name]] for name in (method, BASE))
    return statistics.fmean(ours) - statistics.fmean(base) if ours and base else None


def closed(rows: Rows, method: str, figure: str, oracle: str = ATTRACTED) -> float | None:
    """Share of the gap between the base and the oracle, over the seeds that all three have; None
    without records of the oracle, or if it is not above the base (p < 0.05)."""
    if oracle not in rows:
        return None
    p = p_value(*paired(rows, oracle, BASE, figure))
    if p is not None and p >= 0.05:
        return None
    figures = {
        name: [one["figures"] for one in runs]
        for name, runs in over_common_seeds(rows, method, BASE, oracle).items()
    }
    return gap_closed(method, figures, BASE, figure, oracle)


def cost(rows: Mapping[str, Mapping[int, Record]], method: str, base: str = BASE) -> str:
    """CPU seconds of an epoch relative to the base, each the mean over the runs that have them."""
    ours, others = (
        [one["cpu_seconds"] for one in rows.get(name, {}).values() if "cpu_seconds" in one]
        for name in (method, base)
    )
    return f"{statistics.fmean(ours) / statistics.fmean(others):.2f}" if ours and others else "–"


def table(rows: Rows, methods: Iterable[str] | None = None, oracle: str = ATTRACTED) -> str:
    """Markdown: the base and the bounds first, then by kNN. `oracle`: whose gap to the base methods
    close a share of."""
    first = [name for name in (BASE, ELIMINATED, ATTRACTED) if name in rows]
    others = [name for name in rows if name not in first and "(p " not in name]
    others.sort(
        key=lambda name: -statistics.fmean(one["figures"]["knn"] for one in rows[name].values())
    )
    head = [
        "method",
        "seeds",
        "kNN",
        "linear 100 %",
        "10 %",
        "1 %",
        "kNN against base",
        "p",
        "gap closed: kNN" if oracle == ATTRACTED else "of the gain of `oracle`: kNN",
        "linear",
        "precision",
        "recall",
        "F1",
        "cost",
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in methods or [*first, *others]:
        figures = [one["figures"] for _, one in sorted(rows[name].items())]
        scores = [
            format_spread([one[key] for one in figures if key in one])
            for key in ("knn", "linear", "semi 10 %", "semi 1 %")
        ]
        more, p = (
            gain(rows, name, "knn"),
            p_value(*paired(rows, name, BASE, "knn")) if name != BASE else None,
        )
        shares = [
            None if name in (BASE, oracle) else closed(rows, name, figure, oracle)
            for figure in ("knn", "linear")
        ]
        # not every candidate to a degree
        sharp = [one for one in figures if "+" in name and one.get("flagged", 0) < 99]
        kin = [
            _mean([one[key] for one in sharp if key in one])
            for key in ("precision", "recall", "f1")
        ]
        cells = [
            f"`{name}`",
            str(len(figures)),
            *scores,
            "–" if name == BASE or more is None else f"{more:+.1f}".replace("-", "−"),
        ]
        cells += ["–" if p is None else f"{p:.3f}" if p >= 0.001 else "< 0.001"]
        cells += (
            ["–" if share is None else f"{100 * share:.0f} %".replace("-", "−") for share in shares]
            + kin
            + [cost(rows, name)]
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def criteria_table(datasets: Mapping[str, Rows]) -> str:
    """Markdown: does a criterion order the methods as their kNN accuracy does? Spearman's
    correlation of both differences to the base, over the methods; and the kNN gain of the method
    that is best by the criterion."""
    from scipy.stats import spearmanr

    head = ["data set", "criterion", "methods that eliminate or reweight", "all methods"]
    head += ["best by the criterion", "its kNN against base", "largest kNN against base"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for dataset, rows in datasets.items():
        for key, title in CRITERIA.items():
            gains = {
                name: (gain(rows, name, key), gain(rows, name, "knn"))
                for name, runs in rows.items()
                if "+" in name
                and "oracle" not in name
                and all(key in one["figures"] for one in (*runs.values(), *rows[BASE].values()))
            }
            if len(gains) < 3:
                continue
            careful = {name: both for name, both in gains.items() if "attract" not in name}
            rho = [spearmanr(list(some.values())).statistic for some in (careful, gains)]
            best = max(careful, key=lambda name: careful[name][0] or 0.0)
            cells = [NAMES[dataset], title, *(_signed(each, 2) for each in rho), f"`{best}`"]
            cells += [_signed(careful[best][1] or 0.0)]
            cells += [_signed(max(both[1] or 0.0 for both in careful.values()))]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """The page with each table between its comments.

    Example:
        >>> with_tables("<!-- table a -->\\nold\\n<!-- end -->", {"a": "new"})
        '<!-- table a -->\\n\\nnew\\n\\n<!-- end -->'
    """
    for dataset, text in tables.items():
        pattern = rf"(<!-- table {re.escape(dataset)} -->\n).*?(<!-- end -->)"
        page = re.sub(
            pattern,
            lambda found, text=text: f"{found[1]}\n{text}\n\n{found[2]}",  # type: ignore[misc]
            page,
            flags=re.DOTALL,
        )
    return page


def claims_table(
    claims: Sequence[Mapping[str, Any]], results: Mapping[str, Mapping[str, Rows]]
) -> str:
    """Markdown: each claim, what was run, what was measured, and the verdict."""
    head = ["paper", "claim", "what was run here", "measured", "verdict"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for claim in claims:
        asked = [(one, answer(one, results)) for one in comparisons(claim)]
        known = [(one, found) for one, found in asked if found is not None]
        cells = "; ".join(
            f"{NAMES[one['dataset']]} {REGIMES[one['study']]}: {text}" for one, (text, _) in known
        )
        decided = [(one, said) for one, (_, said) in known if said is not None]
        said = claim.get("verdict", "one seed: no verdict" if known else "not run yet")
        if decided and "verdict" not in claim:
            said = regime_verdict(decided)
        row = [claim["paper"], claim["claim"], claim["run"], cells or "–", f"**{said}**"]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def comparisons(claim: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The evidence of a claim, one entry for each data set."""
    return [
        {**one, "dataset": dataset}
        for one in claim["evidence"]
        for dataset in one.get("datasets", [one.get("dataset")])
    ]


def regime_verdict(decided: Sequence[tuple[Mapping[str, Any], str]]) -> str:
    """The verdict of the first regime that has one; by data set where they differ."""
    study = decided[0][0]["study"]
    by_verdict: dict[str, list[str]] = {}
    for one, said in decided:
        if one["study"] == study:
            by_verdict.setdefault(said, []).append(NAMES[one["dataset"]])
    regime = "" if study == "long" else f" ({REGIMES[study]})"
    if len(by_verdict) == 1:
        return next(iter(by_verdict)) + regime
    ordered = sorted(by_verdict.items(), key=lambda item: VERDICTS.index(item[0]))
    return "; ".join(f"{said}: {', '.join(names)}" for said, names in ordered) + regime


def answer(
    one: Mapping[str, Any], results: Mapping[str, Mapping[str, Rows]]
) -> tuple[str, str | None] | None:
    """What was measured for a comparison of a claim, and the verdict, which needs two seeds; None
    without records."""
    if "gaps" in one:
        return _growth(one, results.get(one["study"], {}))
    rows = results.get(one["study"], {}).get(one["dataset"], {})
    if one["method"] not in rows:
        return None
    if "curve" in one:
        return _change(rows[one["method"]], one["curve"])
    if one["base"] not in rows:
        return None
    if one.get("cost"):
        times = cost(rows, one["method"], one["base"])
        return None if times == "–" else (f"{times} times", None)
    tests = {}
    for figure in [one["figure"]] if "figure" in one else ["knn", "linear"]:
        ours, base = paired(rows, one["method"], one["base"], figure)
        if ours:
            more = statistics.fmean(ours) - statistics.fmean(base)
            tests[figure] = more, p_value(ours, base), len(ours)
    if not tests:
        return None
    words = [
        f"{'kNN' if name == 'knn' else name} {_signed(test[0])}" for name, test in tests.items()
    ]
    more, p, seeds = tests[list(tests)[-1]]
    text = f"{', '.join(words)} ({seeds} seed{'s' if seeds > 1 else ''}{_p(p)})"
    if p is None:
        return text, None
    return text, "reproduced" if p < 0.05 else "same sign" if more > 0 else "not seen"


def _growth(one: Mapping[str, Any], datasets: Mapping[str, Rows]) -> tuple[str, str | None] | None:
    """The gap between method and base in several data sets, and whether the last is wider than the
    first, over the seeds that all of them have."""
    names = (one["method"], one["base"])
    if not all(name in datasets.get(each, {}) for each in one["gaps"] for name in names):
        return None
    common = [datasets[each][name].keys() for each in one["gaps"] for name in names]
    seeds = sorted(set.intersection(*map(set, common)))
    gaps = [
        [
            datasets[each][one["method"]][seed]["figures"]["linear"]
            - datasets[each][one["base"]][seed]["figures"]["linear"]
            for seed in seeds
        ]
        for each in one["gaps"]
    ]
    if not seeds:
        return None
    p = p_value(gaps[-1], gaps[0])
    means = [statistics.fmean(each) for each in gaps]
    shown = ", ".join(f"{mean:.1f}" for mean in means)
    text = f"gap in the linear probe {shown} ({len(seeds)} seed{'s'[: len(seeds) > 1]}{_p(p)})"
    if p is None:
        return text, None
    return text, "reproduced" if p < 0.05 else "same sign" if means[-1] > means[0] else "not seen"


def _change(runs: Mapping[int, Record], name: str) -> tuple[str, str | None] | None:
    """The first and the last value of a curve."""
    curves = [
        [100 * value for value in one["curves"].get(name, []) if value is not None]
        for one in runs.values()
    ]
    curves = [curve for curve in curves if len(curve) > 1]
    if not curves:
        return None
    first, last = [curve[0] for curve in curves], [curve[-1] for curve in curves]
    ends = [f"{statistics.fmean(values):.0f}" for values in (first, last)]
    p = p_value(last, first)
    text = f"{name} {ends[0]} % to {ends[1]} % ({len(curves)} seed{'s'[: len(curves) > 1]}{_p(p)})"
    rises = statistics.fmean(last) > statistics.fmean(first)
    if p is None:
        return text, None
    return text, "reproduced" if p < 0.05 else "same sign" if rises else "not seen"


def _p(p: float | None) -> str:
    return "" if p is None else f", p {f'= {p:.3f}' if p >= 0.001 else '< 0.001'}"


def _signed(value: float, digits: int = 1) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def by_precision(results: Mapping[str, Mapping[str, Rows]]) -> dict[str, Any]:
    """Gain in kNN of detectors by the encoder's own similarity, eliminating, over the precision
    of their flags in the last epoch; and of the oracle, whose precision is 1. One colour for each
    regime, one symbol for each data set; rows with one seed are hollow."""
    colours = dict(
        zip(
            REGIMES,
            ("#1a7f37", "#0969da", "#bc4c00", "#8250df", "#9a6700", "#cf222e"),
            strict=True,
        )
    )
    symbols = dict(
        zip(
            NAMES,
            ("circle", "circle-dot", "diamond", "square", "triangle-up", "star", "x"),
            strict=True,
        )
    )
    traces = []
    for study, datasets in results.items():
        for dataset, rows in datasets.items():
            if dataset not in NAMES or study not in REGIMES:
                continue
            points = []
            for method, runs in rows.items():
                detector = method.removeprefix(f"{BASE}+")
                more = gain(rows, method, "knn")
                found = [
                    one["figures"]["precision"]
                    for one in runs.values()
                    if "precision" in one["figures"]
                ]
                if detector not in (*OWN, "oracle") or more is None or not found:
                    continue
                points.append((statistics.fmean(found) / 100, more, detector, len(runs)))
            for bound in (False, True):
                some = [point for point in points if (point[2] == "oracle") == bound]
                if some:
                    marker = {
                        "symbol": [
                            symbols[dataset] + ("" if point[3] > 1 else "-open") for point in some
                        ],
                        "size": 11,
                        "color": colours[study],
                    }
                    traces.append(
                        {
                            "type": "scatter",
                            "mode": "markers+text",
                            "name": f"{NAMES[dataset]}, {REGIMES[study]}",
                            "showlegend": not bound or len(some) == len(points),
                            "x": [point[0] for point in some],
                            "y": [point[1] for point in some],
                            "text": ["" if bound else f" {point[2]}" for point in some],
                            "textposition": "middle right",
                            "textfont": {"size": 10, "color": INK},
                            "marker": marker,
                            **({"xaxis": "x2", "yaxis": "y2"} if bound else {}),
                        }
                    )
    _clear_names(traces)
    axis = {"gridcolor": GRID, "zeroline": True, "zerolinecolor": INK, "ticks": "outside"}
    precision = {**axis, "title": {"text": "precision of the flagged pairs, last epoch"}}
    layout = {
        "xaxis": {**precision, "tickformat": ".0%", "range": [0, 1.05], "domain": [0, 0.82]},
        "xaxis2": {
            **axis,
            "title": {"text": "oracle"},
            "tickformat": ".0%",
            "tickvals": [1],
            "domain": [0.9, 1],
            "anchor": "y2",
        },
        "yaxis": {**axis, "title": {"text": "gain over simclr, points of kNN"}},
        "yaxis2": {**axis, "anchor": "x2"},
        "legend": {"orientation": "h", "y": -0.18},
    }
    return {"data": traces, "layout": layout}


def _clear_names(traces: Sequence[dict[str, Any]]) -> None:
    """Removes the names, on the right of points, that would cover a point or another name."""
    points = [
        (trace["text"], number, x, y)
        for trace in traces
        if "xaxis" not in trace
        for number, (x, y) in enumerate(zip(trace["x"], trace["y"], strict=True))
    ]
    boxes = [(x - 0.01, x + 0.01, y) for _, _, x, y in points]
    for names, number, x, y in points:
        left, right = x + 0.011, x + 0.02 + 0.0095 * len(names[number])
        if any(left < b and a < right and abs(y - other) < 0.13 for a, b, other in boxes):
            names[number] = ""
        else:
            boxes.append((left, right, y))


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.1f}" if values else "–"


def action_of(method: str) -> str | None:
    """Of a method whose detector flags pairs for SimCLR."""
    name = method.partition(" ")[0]
    if not name.startswith("simclr+"):
        return None
    action = name.partition(":")[2] or "eliminate"
    return action if action in ACTIONS else None


def the_map(rows: Mapping[str, Mapping[int, Record]], figure: str = "knn") -> dict[str, Any]:
    """Precision and recall of what is flagged, and what it gains: squares are labels corrupted on
    purpose, circles are detectors. Methods that give every candidate a degree flag all of them, and
    have no place on the map."""
    points: list[tuple[str, bool, str, float, float, float]] = []
    for method, runs in rows.items():
        action, more = action_of(method), gain(rows, method, figure)
        last = [
            one["figures"]
            for one in runs.values()
            if "precision" in one["figures"] and one["figures"].get("flagged", 0) < 99
        ]
        if action is None or more is None or not last or method.endswith(VARIANTS):
            continue
        made = "oracle" in method
        text = (
            f" {more:+.1f}".replace("-", "−")
            if made
            else f" {_short(method)} {more:+.1f}".replace("-", "−")
        )
        precision, recall = (
            statistics.fmean(one[key] for one in last) / 100 for key in ("precision", "recall")
        )
        points.append((action, made, text, precision, recall, more))
    far = max((abs(point[-1]) for point in points), default=1)
    traces = []
    for column, action in enumerate(ACTIONS, 1):
        for made in (True, False):
            some = [point for point in points if point[:2] == (action, made)]
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers+text",
                    "xaxis": f"x{column}",
                    "yaxis": f"y{column}",
                    "x": [point[3] for point in some],
                    "y": [point[4] for point in some],
                    "text": [point[2] for point in some],
                    "textposition": [_beside(point[2]) for point in some],
                    "textfont": {"size": 11, "color": INK},
                    "marker": {
                        "symbol": "square" if made else "circle",
                        "size": 17 if made else 13,
                        "color": [point[5] for point in some],
                        "colorscale": SCALE,
                        "cmin": -far,
                        "cmax": far,
                        "line": {"color": INK, "width": 1},
                        "showscale": made and column == 2,
                        "colorbar": {"title": {"text": "points of kNN"}, "thickness": 12},
                    },
                    "showlegend": False,
                }
            )
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": INK, "ticks": "outside"}
    across: dict[str, Any] = {
        **axis,
        "title": {"text": "precision of the flagged pairs"},
        "range": [0, 1.25],
        "tickvals": [0, 0.25, 0.5, 0.75, 1],
        "tickformat": ".0%",
    }
    up: dict[str, Any] = {
        **axis,
        "title": {"text": "recall"},
        "type": "log",
        "range": [-2.05, 0.2],
        "tickformat": ".1~%",
        "dtick": 1,
    }
    titles = [
        {
            "text": f"<b>{text}</b>",
            "x": x,
            "y": 1.1,
            "xanchor": "center",
            "xref": "paper",
            "yref": "paper",
            "showarrow": False,
            "font": {"size": 14},
        }
        for text, x in zip(ACTIONS.values(), (0.225, 0.775), strict=True)
    ]
    layout = {
        "xaxis": {**across, "domain": [0, 0.45]},
        "yaxis": up,
        "xaxis2": {**across, "domain": [0.55, 1], "anchor": "y2"},
        "yaxis2": {**up, "anchor": "x2"},
        "annotations": titles,
    }
    return {"data": traces, "layout": layout}


PLACES = {
    "fnc": "bottom center",
    "glofnd": "top center",
    "guide 3 %": "top center",
    "guide 10 %": "top right",
    "ifnd": "bottom right",
    "neighbours": "top right",
    "ring": "bottom right",
}
"""Where the name of a detector stands beside its circle, if not on the right: circles that are
close together share no side."""


def _beside(text: str) -> str:
    """The place of a label on the map."""
    name = text.strip().rpartition(" ")[0]
    return PLACES.get(name, "middle right")


def _short(method: str) -> str:
    """`simclr+known:attract (guide, 1 %)` as `guide 1 %`, and pairs of patches as `patches 10
    %`."""
    name, _, setting = method.removeprefix("simclr+").partition(" ")
    name, setting = name.partition(":")[0], setting.strip("()").replace(",", "")
    return (
        setting if name == "known" or setting.startswith("patches") else f"{name} {setting}".strip()
    )


def over_epochs(rows: Mapping[str, Mapping[int, Record]], methods: Sequence[str]) -> dict[str, Any]:
    """Precision of the flagged pairs epoch by epoch, the mean over the seeds of a method."""
    colours = [
        "#0969da",
        "#bc4c00",
        "#1a7f37",
        "#8250df",
        "#cf222e",
        "#57606a",
        "#9a6700",
        "#1b7c83",
        "#bf3989",
        "#24292f",
    ]
    traces = []
    for place, method in enumerate(name for name in methods if name in rows):
        curves = [one["curves"].get("precision", []) for one in rows[method].values()]
        found = [
            [value for value in values if value is not None] for values in zip(*curves, strict=True)
        ]
        known = [
            (epoch, statistics.fmean(values)) for epoch, values in enumerate(found, 1) if values
        ]
        style = {
            "color": colours[place % len(colours)],
            "width": 2,
            "dash": "solid" if ":attract" in method else "dot",
        }
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": (
                    f"{_short(method)}{', eliminated' if action_of(method) == 'eliminate' else ''}"
                ),
                "x": [epoch for epoch, _ in known],
                "y": [value for _, value in known],
                "line": style,
            }
        )
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": INK, "ticks": "outside"}
    layout = {
        "xaxis": {**axis, "title": {"text": "epoch"}, "dtick": 1},
        "yaxis": {**axis, "title": {"text": "precision"}, "tickformat": ".0%"},
    }
    return {"data": traces, "layout": layout}


def by_classes(
    results: Mapping[str, Mapping[str, Mapping[int, Record]]],
    classes: Mapping[str, int],
    figure: str = "linear",
) -> dict[str, Any]:
    """Accuracy of the base, IFND and SupCon over the number of classes, and how far the first two
    are below the last: Figure 1 of IFND."""
    names = {
        BASE: ("SimCLR", "#0969da"),
        "simclr+ifnd": ("IFND", "#1a7f37"),
        ATTRACTED: ("SupCon", "#cf222e"),
    }
    known = sorted(
        (number, dataset)
        for dataset, number in classes.items()
        if set(names) <= results.get(dataset, {}).keys()
    )
    means = {
        method: [
            statistics.fmean(one["figures"][figure] for one in results[dataset][method].values())
            for _, dataset in known
        ]
        for method in names
    }
    x = [str(number) for number, _ in known]
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": title,
            "x": x,
            "y": means[method],
            "line": {"color": colour, "width": 2},
        }
        for method, (title, colour) in names.items()
    ]
    for method, (title, colour) in list(names.items())[:2]:
        gaps = [above - own for above, own in zip(means[ATTRACTED], means[method], strict=True)]
        bars = {
            "type": "bar",
            "name": f"{title} below SupCon",
            "x": x,
            "y": gaps,
            "marker": {"color": colour, "opacity": 0.5},
        }
        traces.append(
            {
                **bars,
                "yaxis": "y2",
                "text": [f"{gap:.1f}" for gap in gaps],
                "textposition": "outside",
            }
        )
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": INK, "ticks": "outside"}
    layout = {
        "barmode": "group",
        "xaxis": {
            **axis,
            "title": {"text": "number of classes"},
            "type": "category",
            "anchor": "y2",  # below the bars
        },
        "yaxis": {
            **axis,
            "title": {"text": "accuracy of a linear probe, percent"},
            "domain": [0.4, 1],
        },
        "yaxis2": {**axis, "title": {"text": "gap, points"}, "domain": [0, 0.3], "anchor": "x"},
    }
    return {"data": traces, "layout": layout}


def write_svg(figure: Mapping[str, Any], path: Path, width: int, height: int) -> None:
    """Drawn by plotly.js in a headless Chromium."""
    from plotly.offline import get_plotlyjs

    usual = {
        "font": {"family": "sans-serif", "size": 12, "color": INK},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
    }
    layout = {**usual, "margin": {"l": 60, "r": 20, "t": 50, "b": 55}, **figure["layout"]}
    drawn = json.dumps({"data": figure["data"], "layout": layout}).replace("</", "<\\/")
    script = f"""const figure = {drawn}; const div = document.getElementById("figure");
Plotly.newPlot(div, figure.data, figure.layout, {{staticPlot: true}})
  .then(() => Plotly.toImage(div, {{format: "svg", width: {width}, height: {height}, imageDataOnly: true}}))
  .then((svg) => {{ const text = document.createElement("pre"); text.textContent = svg; document.body.replaceChildren(text); }});"""  # noqa: E501
    page = (
        '<meta charset="utf-8"><body><div'
        f' id="figure"></div><script>{get_plotlyjs()}</script><script>{script}</script></body>'
    )
    browser = next(
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "figure.html"
        source.write_text(page, encoding="utf-8")
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--virtual-time-budget=60000",
            f"--user-data-dir={folder}/profile",
        ]
        shown = subprocess.run(
            [browser, *flags, "--dump-dom", source.as_uri()],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    match = re.search(r"<pre>(.*?)</pre>", shown, re.DOTALL)
    if match is None:
        raise SystemExit(f"{browser} drew nothing for {path.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html.unescape(match[1]) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="?", help="the file of --classes")
    parser.add_argument("--page", type=Path, help="Markdown page whose tables are replaced")
    parser.add_argument(
        "--images", type=Path, help="folder of the figures; none are drawn unless given"
    )
    parser.add_argument("--map", default="gtsrb", help="data set of the figures")
    parser.add_argument(
        "--classes",
        type=Path,
        help="study whose data sets name their number of classes; draws the gap over it",
    )
    options = parser.parse_args()
    if options.classes is not None:
        described = yaml.safe_load(options.classes.read_text(encoding="utf-8"))["datasets"]
        numbers = {name: one["classes"] for name, one in described.items()}
        figure, images = by_classes(read(options.results), numbers), options.images
        return write_svg(figure, (images or options.results.parent) / "gap-classes.svg", 700, 520)
    results = {
        study: read(path)
        for study in REGIMES
        if (path := HERE / "results" / f"{study}.json").exists()
    }
    results["text"] = read_text(text_contest.RESULTS)
    claims = yaml.safe_load((HERE / "claims.yaml").read_text(encoding="utf-8"))
    tables = {"claims": claims_table(claims, results)}
    if "good_encoder" in results:
        tables["criteria"] = criteria_table(results["good_encoder"])
    for study, prefix in PREFIXES.items():
        for dataset, rows in results.get(study, {}).items():
            if BASE in rows:
                tables[prefix + dataset] = table(
                    rows, oracle=ATTRACTED if study == "gain" else ELIMINATED
                )
    protocol = yaml.safe_load(text_contest.STUDY.read_text(encoding="utf-8"))
    found = text_contest.tables(protocol, text_contest.RESULTS)
    tables |= {f"text {data}": text for data, text in found.items()}
    for name, text in tables.items():
        print(f"\n{name}; percent\n\n{text}")
    if options.page is not None:
        options.page.write_text(
            with_tables(options.page.read_text(encoding="utf-8"), tables), encoding="utf-8"
        )
    if options.images is not None:
        rows = results["gain"][options.map]
        write_svg(by_precision(results), options.images / "gain-precision.svg", 900, 560)
        write_svg(the_map(rows), options.images / "gain-map.svg", 1000, 560)
        kin = [
            name
            for name in rows
            if action_of(name) is not None
            and not any(
                part in name for part in ("oracle", "known", "guide", "teacher", "second head")
            )
        ]
        write_svg(over_epochs(rows, kin), options.images / "gain-epochs.svg", 700, 340)


if __name__ == "__main__":
    main()
