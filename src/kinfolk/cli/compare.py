"""`kinfolk compare` and `kinfolk sweep`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kinfolk.cli.options import (
    DATA,
    TRAINING,
    Data,
    NoReport,
    Recipe,
    examples,
    option,
    overwrite_option,
    plain_table,
    require_new,
    say,
    say_wrapped,
    screen,
    with_settings,
)
from kinfolk.errors import UsageError, plural, printable

if TYPE_CHECKING:
    from rich.table import Table

    from kinfolk.comparing import Comparison
    from kinfolk.comparing.table import Column


EPILOG = examples(
    "kinfolk compare runs/simclr-0 runs/simclr-1 runs/glofnd-0 runs/glofnd-1",
    "kinfolk compare runs/study --base sogclr --figure knn",
    "kinfolk compare runs/study --out compare.html",
)


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Evaluated runs, or folders that contain several."),
    ],
    base: Annotated[
        str | None,
        option(
            "Method to compare with; default: the framework of each method.",
            "--base",
            "-b",
            metavar="METHOD",
        ),
    ] = None,
    figure: Annotated[
        str | None, option("Metric for gains and tests, such as knn; default: linear.")
    ] = None,
    out: Annotated[Path | None, option("File to write: .csv or .html.", "--out", "-o")] = None,
    overwrite: Annotated[bool, overwrite_option("the file")] = False,
) -> None:
    """Compare runs: mean ± deviation over seeds, and a test against the base method.

    Runs of one method that differ only in their seed form one row.
    `gain` is method − base in points, so + is better. `p` is that of a two-sided paired t-test over
    n seeds, corrected by Holm for several methods. `to oracle` is method − oracle, so − is below
    the oracle.
    """
    from kinfolk.comparing import compare as compare_runs

    if out is not None:
        require_new(out, overwrite)
    found = compare_runs(runs, base=base, figure=figure)
    if out is None:
        show_comparison(found)
    else:
        found.save(out)
        say(f"{plural(len(found.records), 'row')}: {out}")


def show_comparison(found: Comparison) -> None:
    """Prints one table if the terminal is wide enough, else several that fit."""
    from rich.measure import Measurement

    from kinfolk.comparing.page import caption

    console = screen()

    def fits(columns: list[Column]) -> bool:
        table, unlimited = _table(found, columns), console.options.update(width=10_000)
        return Measurement.get(console, unlimited, table).maximum <= console.width

    parts: list[list[Column]] = [[]]
    for column in found.columns:
        if parts[-1] and not fits([*parts[-1], column]):
            parts.append([])
        parts[-1].append(column)
    for part in parts:
        console.print(_table(found, part), soft_wrap=False)
    for sentence in found.sentences():
        say_wrapped(sentence)
    for line in (caption(found), *found.notes):
        say_wrapped(line, "dim")


def _table(found: Comparison, columns: list[Column]) -> Table:
    from rich.text import Text

    heads = [column.head for column in columns]
    table = plain_table("method", *heads, right=tuple(heads))
    for column in table.columns[1:]:
        column.no_wrap = True
    for record in found.records:
        cells = (Text(printable(column.text(record))) for column in columns)
        table.add_row(Text(printable(record["method"]), "bold"), *cells)
    return table


_option = partial(option, panel=TRAINING)
SWEEP_EPILOG = examples(
    "kinfolk sweep --data digits --out sweeps/alpha --method simclr,simclr+glofnd --set"
    " detector.alpha=0.05,0.1 --seeds 0,1,2 --epochs 20",
    "kinfolk compare sweeps/alpha",
)
SWEEP_SETTINGS = {
    "--labels-from-folders": "data.labels_from_folders",
    "--epochs": "epochs",
    "--batch-size": "batch_size",
}


@with_settings(SWEEP_SETTINGS)
def sweep(
    *,
    data: Data,
    out: Annotated[
        Path, option("Folder for the runs.", "--out", "-o", metavar="FOLDER", panel=DATA)
    ],
    chosen: Mapping[str, Any],
    method: Annotated[
        str, _option("Methods, separated by commas.", "--method", "-m", metavar="METHODS")
    ] = "simclr",
    settings: Annotated[
        list[str] | None,
        _option("Values of a setting. Can be repeated.", "--set", metavar="KEY=VALUE,VALUE"),
    ] = None,
    seeds: Annotated[str, _option("Seeds, separated by commas.", metavar="N,N")] = "0",
    recipe: Recipe = None,
    no_report: NoReport = False,
) -> None:
    """Train every combination of methods, settings and seeds, and compare them in one table.

    Repeat the command to continue an interrupted sweep: finished runs are skipped.
    Settings of detectors apply to methods with a detector only.
    """
    from kinfolk.sweeping import split_values
    from kinfolk.sweeping import sweep as run_sweep

    numbers = [word.strip() for word in seeds.split(",")]
    if not all(word.isdecimal() for word in numbers):
        raise UsageError(
            f"--seeds (={seeds}) must be whole numbers separated by commas, such as 0,1,2"
        )
    found = run_sweep(
        data,
        out,
        methods=[word.strip() for word in method.split(",")],
        settings=dict(split_values(setting) for setting in settings or []),
        seeds=[int(word) for word in numbers],
        recipe=recipe,
        report=not no_report,
        common=chosen,
    )
    if found.table is not None:
        show_comparison(found.table)
    elif found.runs[0].rank == 0:
        number = plural(len(found.runs), "run")
        say(f"{number} in {out}; the data has no labels, so nothing is compared")
