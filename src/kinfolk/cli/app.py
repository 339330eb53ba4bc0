"""The verbs put together, and what stands before any of them: `--version`, `--help`, `--debug`."""

from __future__ import annotations

from typing import Annotated

import typer

from kinfolk.cli import audit, compare, data, embed, eval, export, methods, report, train
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
        "kinfolk VERB --help",
    )
)
def _root(
    version: Annotated[
        bool, typer.Option("--version", metavar=FLAG, help="Show the version and leave.", callback=_show_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", metavar=FLAG, help="Show the traceback of an error.")] = False,
) -> None:
    """Contrastive representation learning that knows its false negatives."""


LEARN, LOOK = "Learn", "Look"
app.command("train", rich_help_panel=LEARN, epilog=train.EPILOG)(train.train)
app.command("eval", rich_help_panel=LEARN, epilog=eval.EPILOG)(eval.evaluate)
app.command("embed", rich_help_panel=LEARN, epilog=embed.EPILOG)(embed.embed)
app.command("export", rich_help_panel=LEARN, epilog=export.EPILOG)(export.export)
app.command("compare", rich_help_panel=LOOK, epilog=compare.EPILOG)(compare.compare)
app.command("audit", rich_help_panel=LOOK, epilog=audit.EPILOG)(audit.audit)
app.command("report", rich_help_panel=LOOK, epilog=report.EPILOG)(report.report)
app.command("data", rich_help_panel=LOOK, epilog=data.EPILOG)(data.data)
app.command("methods", rich_help_panel=LOOK, epilog=methods.EPILOG)(methods.methods)
app.command("cnce", rich_help_panel=LOOK, epilog=cnce.EPILOG)(cnce.cnce)
