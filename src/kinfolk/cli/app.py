"""The `kinfolk` application: all commands, and the options `--version`, `--help` and `--debug`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated

import typer

from kinfolk.cli import audit, cnce, compare, data, eval, lists, outputs, train
from kinfolk.cli.options import FLAG, examples, flowing

app = typer.Typer(
    name="kinfolk",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        typer.echo(f"kinfolk {metadata.version('kinfolk')}")
        raise typer.Exit


@app.callback(
    epilog=examples(
        "kinfolk advise photos/",
        "kinfolk train --data photos/ --out runs/photos",
        "kinfolk eval runs/photos --data labelled/ --labels-from-folders",
        "kinfolk COMMAND --help",
    )
)
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            metavar=FLAG,
            help="Show the version and exit.",
            callback=_show_version,
            is_eager=True,
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", metavar=FLAG, help="Show the traceback of an error.")
    ] = False,
) -> None:
    """Contrastive representation learning that knows its false negatives."""


TRAIN, INSPECT = "Train and use", "Inspect"
COMMANDS: tuple[tuple[str, str, Callable[..., None], str], ...] = (
    ("train", TRAIN, train.train, train.EPILOG),
    ("sweep", TRAIN, compare.sweep, compare.SWEEP_EPILOG),
    ("eval", TRAIN, eval.evaluate, eval.EPILOG),
    ("embed", TRAIN, outputs.embed, outputs.EMBED_EPILOG),
    ("export", TRAIN, outputs.export, outputs.EXPORT_EPILOG),
    ("advise", INSPECT, audit.advise, audit.ADVISE_EPILOG),
    ("audit", INSPECT, audit.audit, audit.EPILOG),
    ("compare", INSPECT, compare.compare, compare.EPILOG),
    ("report", INSPECT, outputs.report, outputs.REPORT_EPILOG),
    ("data", INSPECT, data.data, data.EPILOG),
    ("methods", INSPECT, lists.methods, lists.METHODS_EPILOG),
    ("recipes", INSPECT, lists.recipes, lists.RECIPES_EPILOG),
    ("settings", INSPECT, lists.settings, lists.SETTINGS_EPILOG),
    ("cnce", INSPECT, cnce.cnce, cnce.EPILOG),
)
for _name, _panel, _function, _epilog in COMMANDS:
    app.command(
        _name, rich_help_panel=_panel, epilog=_epilog, help=flowing(inspect.getdoc(_function) or "")
    )(_function)
