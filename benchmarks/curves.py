"""Figures over the epochs of all runs of a study, drawn side by side: a panel for each framework
and figure, a line for each run.

    .venv/bin/python benchmarks/curves.py runs/study/spcl-temperature/cifar10-8000 tp_similarity fn_similarity [--out curves.html]

Reads the metrics.jsonl of every run below the folder; the page needs nothing else.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

PALETTE = ("#3b6fb6", "#d1772f", "#3f9a6b", "#b0457b", "#7a6bb5", "#8a8a3a")
Runs = dict[str, list[dict[str, float]]]


def read(folder: Path) -> Runs:
    """The epochs of every run, by its folder's name: `spcl_temperature_0.1-0`."""
    found = {
        path.parent.name: path.read_text(encoding="utf-8")
        for path in sorted(folder.glob("*/metrics.jsonl"))
    }
    return {name: [json.loads(line) for line in text.splitlines()] for name, text in found.items()}


def method_of(run: str) -> str:
    """`spcl` of `spcl_temperature_0.1-0`, `simclr+fnc` of `simclr+fnc-0`."""
    return re.sub(r"-\d+$", "", run).partition("_")[0]


def drawn(runs: Runs, names: list[str]) -> Any:
    """Methods from top to bottom, figures from left to right; the panels of a figure have one
    scale."""
    from plotly.subplots import make_subplots

    methods = list(dict.fromkeys(map(method_of, runs)))
    titles = [f"{method}: {name}" for method in methods for name in names]
    figure = make_subplots(
        len(methods),
        len(names),
        subplot_titles=titles,
        x_title="epoch",
        vertical_spacing=0.24 / len(methods),
    )
    for row, method in enumerate(methods, 1):
        for shade, run in enumerate(run for run in runs if method_of(run) == method):
            for column, name in enumerate(names, 1):
                known = [epoch for epoch in runs[run] if name in epoch]
                figure.add_scatter(
                    x=[epoch["epoch"] for epoch in known],
                    y=[epoch[name] for epoch in known],
                    name=re.sub(r"-(\d+)$", r", seed \1", run).replace("_", " "),
                    mode="lines",
                    legendgroup=run,
                    showlegend=column == 1,
                    line_color=PALETTE[shade % len(PALETTE)],
                    row=row,
                    col=column,
                )
    for column in range(1, len(names) + 1):
        first = figure.get_subplot(1, column).yaxis.plotly_name.replace("axis", "")
        figure.update_yaxes(matches=first, col=column)
    figure.update_layout(template="plotly_white", height=120 + 300 * len(methods))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="runs of a study")
    parser.add_argument("figures", nargs="+", help="names in metrics.jsonl")
    parser.add_argument(
        "--out", type=Path, help="page to write; by default curves.html beside the runs"
    )
    options = parser.parse_args()
    runs = read(options.folder)
    if not runs:
        parser.error(f"there is no run below {options.folder}")
    out = options.out or options.folder / "curves.html"
    drawn(runs, options.figures).write_html(out)
    print(out)


if __name__ == "__main__":
    main()
