"""`kinfolk compare` prints one table over runs and seeds; `kinfolk sweep` trains combinations of
methods, settings and seeds first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kinfolk.cli.options import DATA, FLAG, RUNNING, SOURCE_HELP, Debug, LabelsFromFolders, examples
from kinfolk.errors import UsageError, counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kinfolk.comparing import Comparison
    from kinfolk.comparing.table import Column


FORMATS = ("table", "csv", "markdown", "latex", "html")
EPILOG = examples(
    "kinfolk compare runs/simclr-0 runs/simclr-1 runs/glofnd-0 runs/glofnd-1",
    "kinfolk compare runs/study --base sogclr --figure knn",
    "kinfolk compare runs/study --columns linear,gain,p --out table.tex",
    "kinfolk compare runs/study --out compare.html",
)


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Evaluated runs, or folders that contain several.",
            show_default=False,
        ),
    ],
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            "-b",
            metavar="METHOD",
            help="Method to compare with. [dim]Default: their framework.[/]",
            show_default=False,
        ),
    ] = None,
    oracle: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="Method that uses the labels. [dim]Default: the base with +oracle.[/]",
            show_default=False,
        ),
    ] = None,
    figure: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Figure for gains and tests. [dim]Default: linear.[/]",
            show_default=False,
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…",
            help="Columns to show, by their names. [dim]Default: all.[/]",
            show_default=False,
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            "-f",
            help="table, csv, markdown, latex or html. [dim]Default: by --out, or table.[/]",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="File to write: .csv, .md, .tex or .html.", show_default=False
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", metavar=FLAG, help="Replace the file.", rich_help_panel=RUNNING
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Compare runs: mean ± deviation over seeds, a test against the base, the gap to the oracle.

    Runs of one method that differ only in their seed form one row.
    gain: method − base in points, + is better; p: two-sided paired t-test over n seeds, corrected
    by Holm for several methods. to oracle: method − oracle, − is below it; gap closed: (method −
    base) / (oracle − base), only if that gap is beyond noise.
    """
    _check(format, out, overwrite)
    from kinfolk.cli.options import screen
    from kinfolk.comparing import compare as compare_runs

    names = None if columns is None else columns.split(",")
    found = compare_runs(runs, base=base, oracle=oracle, figure=figure, columns=names)
    if out is not None:
        found.save(out, format)
        screen().print(f"{counted(len(found.records), 'row')}: {out}", markup=False)
    elif format in (None, "table"):
        show_comparison(found, screen())
    else:
        typer.echo(found.to(str(format)), nl=False)


def _check(format: str | None, out: Path | None, overwrite: bool) -> None:
    if format is not None and format not in FORMATS:
        raise UsageError(f"--format (={format}) must be one of {', '.join(FORMATS)}")
    if out is None:
        return
    if format == "table":
        raise UsageError(
            "--format table is for the screen; leave out --out, or choose csv, markdown, latex or"
            " html"
        )
    if out.exists() and not overwrite:
        raise UsageError(
            f"{out} exists; choose another file with --out, or replace it with --overwrite"
        )


def show_comparison(found: Comparison, console: Console) -> None:
    """One table if the terminal is wide enough, else one for each section, in parts that fit."""
    from rich.text import Text

    from kinfolk.errors import printable

    if _fits(found, found.columns, console):
        console.print(_table(found, found.columns), soft_wrap=False)
    else:
        for section in dict.fromkeys(column.section for column in found.columns):
            columns = [column for column in found.columns if column.section == section]
            if section == "tests":  # repeat the figure that they are of
                columns = [
                    *(column for column in found.columns if column.key == found.figure),
                    *columns,
                ]
            for part in _parts(found, columns, console):
                console.print(_table(found, part), soft_wrap=False)
    for sentence in found.sentences():
        console.print(Text(printable(sentence)), soft_wrap=False)
    for line in (_caption(found), *found.notes):
        console.print(Text(printable(line), "dim"), soft_wrap=False)


def _caption(found: Comparison) -> str:
    from kinfolk.comparing.page import caption

    return caption(found)


def _table(found: Comparison, columns: list[Column]) -> Table:
    from rich.text import Text

    from kinfolk.cli.options import plain_table
    from kinfolk.errors import printable

    table = plain_table(
        "method",
        *(column.head for column in columns),
        right=tuple(column.head for column in columns),
    )
    for column in table.columns[1:]:
        column.no_wrap = True
    for record in found.records:
        table.add_row(
            Text(printable(record["method"]), "bold"),
            *(Text(printable(column.text(record))) for column in columns),
        )
    return table


def _fits(found: Comparison, columns: list[Column], console: Console) -> bool:
    from rich.measure import Measurement

    return (
        Measurement.get(
            console, console.options.update(width=10_000), _table(found, columns)
        ).maximum
        <= console.width
    )


def _parts(found: Comparison, columns: list[Column], console: Console) -> list[list[Column]]:
    """As few parts as fit, of about the same number of columns; a single column is a part even if
    it does not fit."""
    for number in range(1, len(columns) + 1):
        size = -(-len(columns) // number)
        parts = [columns[start : start + size] for start in range(0, len(columns), size)]
        if all(_fits(found, part, console) for part in parts):
            return parts
    return [[column] for column in columns]


TRAINING = "Training"
SWEEP_EPILOG = examples(
    "kinfolk sweep --data digits --out sweeps/alpha --method simclr,simclr+glofnd --set"
    " detector.alpha=0.05,0.1 --seeds 0,1,2 --epochs 20",
    "kinfolk compare sweeps/alpha",
)


def sweep(
    data: Annotated[
        str,
        typer.Option("--data", "-d", help=SOURCE_HELP, rich_help_panel=DATA, show_default=False),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="Folder for the runs.", rich_help_panel=DATA, show_default=False
        ),
    ],
    labels_from_folders: LabelsFromFolders = False,
    method: Annotated[
        str,
        typer.Option(
            "--method", "-m", help="Methods, separated by commas.", rich_help_panel=TRAINING
        ),
    ] = "simclr",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE,VALUE",
            help="Values of a setting. Can be repeated.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    seeds: Annotated[
        str, typer.Option(help="Seeds, separated by commas.", rich_help_panel=TRAINING)
    ] = "0",
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            "--config",
            help="Recipe of all runs.",
            rich_help_panel=TRAINING,
            show_default=False,
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Number of epochs.", rich_help_panel=TRAINING, show_default=False
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Samples per step, over all devices.",
            rich_help_panel=TRAINING,
            show_default=False,
        ),
    ] = None,
    no_report: Annotated[
        bool,
        typer.Option(
            "--no-report", metavar="", help="Do not write report.html.", rich_help_panel=RUNNING
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Train every combination of methods, settings and seeds, and compare them in one table.

    Repeat the command to continue an interrupted sweep: finished runs are skipped.
    Settings of detectors apply to methods with a detector only.
    """
    from kinfolk.cli.options import screen
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
        epochs=epochs,
        batch_size=batch_size,
        report=not no_report,
        common={"data.labels_from_folders": True} if labels_from_folders else {},
    )
    if found.table is not None:
        show_comparison(found.table, screen())
    elif found.runs[0].rank == 0:
        screen().print(
            f"{counted(len(found.runs), 'run')} in {out}; the data has no labels, so nothing is"
            " compared",
            markup=False,
        )
