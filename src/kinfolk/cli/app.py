"""The `kinfolk` application: all commands, and the options `--version`, `--help` and `--debug`."""

from __future__ import annotations

from typing import Annotated

import typer

from kinfolk.cli import audit, compare, data, eval, lists, outputs, train
from kinfolk.cli.options import FLAG, examples
from kinfolk.cnce import command as cnce

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
        "kinfolk train --data photos/ --out runs/photos --method simclr",
        "kinfolk eval runs/photos --data labelled/ --labels-from-folders",
        "kinfolk COMMAND --help",
    )
)
def _root(
    version: Annotated[
        bool, typer.Option("--version", metavar=FLAG, help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", metavar=FLAG, help="Show the traceback of an error.")] = False,
) -> None:
    """Contrastive representation learning that knows its false negatives."""


TRAIN, INSPECT = "Train and use", "Inspect"
app.command("train", rich_help_panel=TRAIN, epilog=train.EPILOG)(train.train)
app.command("sweep", rich_help_panel=TRAIN, epilog=compare.SWEEP_EPILOG)(compare.sweep)
app.command("eval", rich_help_panel=TRAIN, epilog=eval.EPILOG)(eval.evaluate)
app.command("embed", rich_help_panel=TRAIN, epilog=outputs.EMBED_EPILOG)(outputs.embed)
app.command("export", rich_help_panel=TRAIN, epilog=outputs.EXPORT_EPILOG)(outputs.export)
app.command("compare", rich_help_panel=INSPECT, epilog=compare.EPILOG)(compare.compare)
app.command("audit", rich_help_panel=INSPECT, epilog=audit.EPILOG)(audit.audit)
app.command("advise", rich_help_panel=INSPECT, epilog=audit.ADVISE_EPILOG)(audit.advise)
app.command("report", rich_help_panel=INSPECT, epilog=outputs.REPORT_EPILOG)(outputs.report)
app.command("data", rich_help_panel=INSPECT, epilog=data.EPILOG)(data.data)
app.command("methods", rich_help_panel=INSPECT, epilog=lists.METHODS_EPILOG)(lists.methods)
app.command("recipes", rich_help_panel=INSPECT, epilog=lists.RECIPES_EPILOG)(lists.recipes)
app.command("cnce", rich_help_panel=INSPECT, epilog=cnce.EPILOG)(cnce.cnce)
