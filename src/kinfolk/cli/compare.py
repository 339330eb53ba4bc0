"""`kinfolk compare`: one table over runs and seeds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kinfolk.cli.options import FLAG, RUNNING, Debug, examples
from kinfolk.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kinfolk.comparing import Comparison
    from kinfolk.comparing.table import Column

FORMATS = ("table", "csv", "markdown", "latex")
EPILOG = examples(
    "kinfolk compare runs/simclr-0 runs/simclr-1 runs/glofnd-0 runs/glofnd-1",
    "kinfolk compare runs/study --base sogclr --figure knn",
    "kinfolk compare runs/study --columns linear,gain,p --out table.tex",
)


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Evaluated runs, or folders that hold several.", show_default=False)],
    base: Annotated[
        str | None,
        typer.Option("--base", "-b", metavar="METHOD", help="Compare all with it. [dim]Default: their framework.[/]", show_default=False),
    ] = None,
    oracle: Annotated[
        str | None,
        typer.Option(metavar="METHOD", help="Measure gaps to it. [dim]Default: the base with +oracle.[/]", show_default=False),
    ] = None,
    figure: Annotated[
        str | None, typer.Option(metavar="NAME", help="What gain, p and gap are of. [dim]Default: linear.[/]", show_default=False)
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(metavar="NAME,…", help="Columns to show, by their names. [dim]Default: all.[/]", show_default=False),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option("--format", "-f", help="table, csv, markdown or latex. [dim]Default: by --out, or table.[/]", show_default=False),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write: .csv, .md or .tex.", show_default=False)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", metavar=FLAG, help="Replace the file.", rich_help_panel=RUNNING)] = False,
    debug: Debug = False,
) -> None:
    """Put runs side by side: mean ± deviation over seeds, a test against the base, the gap to the oracle.

    Runs of one method that differ only in their seed are one row.
    gain: points above the base; p: one-sided paired t-test of it, over seeds.
    gap closed: (method − base) / (oracle − base).
    """
    _check(format, out, overwrite)
    from kinfolk.cli.options import screen
    from kinfolk.comparing import compare as compare_runs

    names = None if columns is None else columns.split(",")
    found = compare_runs(runs, base=base, oracle=oracle, figure=figure, columns=names)
    if out is not None:
        found.save(out, format)
        screen().print(f"{len(found.records)} rows: {out}", markup=False)
    elif format in (None, "table"):
        _show(found, screen())
    else:
        typer.echo(found.to(str(format)), nl=False)


def _check(format: str | None, out: Path | None, overwrite: bool) -> None:
    if format is not None and format not in FORMATS:
        raise UsageError(f"--format (={format}) must be one of {', '.join(FORMATS)}")
    if out is None:
        return
    if format == "table":
        raise UsageError("--format table is for the screen; leave --out away, or give csv, markdown or latex")
    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists; give another --out, or --overwrite to replace it")


def _show(found: Comparison, console: Console) -> None:
    """One table where the screen is wide enough, else one for each section, in parts that fit."""
    from rich.text import Text

    from kinfolk.errors import printable

    if _fits(found, found.columns, console):
        console.print(_table(found, found.columns), soft_wrap=False)
    else:
        for section in dict.fromkeys(column.section for column in found.columns):
            columns = [column for column in found.columns if column.section == section]
            if section == "tests":  # what they are of, once more
                columns = [*(column for column in found.columns if column.key == found.figure), *columns]
            for part in _parts(found, columns, console):
                console.print(_table(found, part), soft_wrap=False)
    for line in (_caption(found), *found.notes):
        console.print(Text(printable(line), "dim"), soft_wrap=False)


def _caption(found: Comparison) -> str:
    numbers = {len(record["seeds"]) for record in found.records}
    seeds = "seeds" if len(numbers) > 1 else f"{max(numbers)} seeds"
    spread = "One seed each" if numbers == {1} else f"Mean ± standard deviation over {seeds}"
    oracles = sorted({record["oracle"] for record in found.records} - {None})
    known = f", the oracle is {' or '.join(oracles)}" if oracles else ""
    tests = any(column.section == "tests" for column in found.columns)
    return f"{spread}, in percent" + (f"; gain and the like are of {found.figure}{known}." if tests else ".")


def _table(found: Comparison, columns: list[Column]) -> Table:
    from rich.text import Text

    from kinfolk.cli.options import plain_table
    from kinfolk.comparing.table import cell
    from kinfolk.errors import printable

    table = plain_table("method", *(column.head for column in columns), right=tuple(column.head for column in columns))
    for column in table.columns[1:]:
        column.no_wrap = True
    for record in found.records:
        table.add_row(Text(printable(record["method"]), "bold"), *(Text(printable(cell(record, column))) for column in columns))
    return table


def _fits(found: Comparison, columns: list[Column], console: Console) -> bool:
    from rich.measure import Measurement

    return Measurement.get(console, console.options.update(width=10_000), _table(found, columns)).maximum <= console.width


def _parts(found: Comparison, columns: list[Column], console: Console) -> list[list[Column]]:
    """As few parts as fit, of about the same number of columns; a single column is a part even where it does not."""
    for number in range(1, len(columns) + 1):
        size = -(-len(columns) // number)
        parts = [columns[start : start + size] for start in range(0, len(columns), size)]
        if all(_fits(found, part, console) for part in parts):
            return parts
    return [[column] for column in columns]
