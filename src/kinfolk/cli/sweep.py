"""`kinfolk sweep`: trains combinations of methods, settings and seeds, and compares them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kinfolk.cli.options import DATA, RUNNING, SOURCE_HELP, Debug, LabelsFromFolders, examples
from kinfolk.errors import UsageError

TRAINING = "Training"
EPILOG = examples(
    "kinfolk sweep --data digits --out sweeps/alpha --method simclr,simclr+glofnd --set detector.alpha=0.05,0.1 --seeds 0,1,2 --epochs 20",
    "kinfolk compare sweeps/alpha",
)


def sweep(
    data: Annotated[str, typer.Option("--data", "-d", help=SOURCE_HELP, rich_help_panel=DATA, show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the runs.", rich_help_panel=DATA, show_default=False)],
    labels_from_folders: LabelsFromFolders = False,
    method: Annotated[str, typer.Option("--method", "-m", help="Methods, separated by commas.", rich_help_panel=TRAINING)] = "simclr",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE,VALUE", help="Values of a setting. Can be repeated.", rich_help_panel=TRAINING),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.", rich_help_panel=TRAINING)] = "0",
    recipe: Annotated[
        str | None, typer.Option("--recipe", "--config", help="Recipe of all runs.", rich_help_panel=TRAINING, show_default=False)
    ] = None,
    epochs: Annotated[int | None, typer.Option(metavar="N", help="Number of epochs.", rich_help_panel=TRAINING, show_default=False)] = None,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", help="Samples per step, over all devices.", rich_help_panel=TRAINING, show_default=False)
    ] = None,
    no_report: Annotated[bool, typer.Option("--no-report", metavar="", help="Do not write report.html.", rich_help_panel=RUNNING)] = False,
    debug: Debug = False,
) -> None:
    """Train every combination of methods, settings and seeds, and compare them in one table.

    Repeat the command to continue an interrupted sweep: finished runs are skipped.
    Settings of detectors apply to methods with a detector only.
    """
    from kinfolk.cli.compare import show_comparison
    from kinfolk.cli.options import screen
    from kinfolk.sweeping import split_values
    from kinfolk.sweeping import sweep as run_sweep

    numbers = [word.strip() for word in seeds.split(",")]
    if not all(word.isdecimal() for word in numbers):
        raise UsageError(f"--seeds (={seeds}) must be whole numbers separated by commas, such as 0,1,2")
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
        screen().print(f"{len(found.runs)} runs in {out}; the data has no labels, so nothing is compared", markup=False)
