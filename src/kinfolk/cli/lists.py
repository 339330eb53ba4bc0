"""Commands that list methods, recipes, settings, and what is in a data source."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kinfolk.cli.options import (
    SOURCE_HELP,
    LabelsFromFolders,
    Workers,
    examples,
    option,
    print_table,
    say,
    say_wrapped,
    screen,
)
from kinfolk.errors import UsageError, plural, short

if TYPE_CHECKING:
    from kinfolk.data.images import ImageData

ACTIONS = {
    "eliminate": "remove from the denominator (default of most detectors)",
    "attract": "use as an additional positive",
    "reweight": "keep in the denominator with a weight between 0 and 1",
}
METHODS_EPILOG = examples("kinfolk methods", "kinfolk train --method sogclr+glofnd:attract …")


def methods() -> None:
    """List frameworks, detectors and actions, and how to compose them."""
    from kinfolk.detectors import DETECTORS
    from kinfolk.frameworks import FRAMEWORKS

    detectors = "Detectors: which candidates are kin (false negatives)"
    parts: dict[str, list[tuple[str, ...]]] = {
        "Frameworks: where anchors and candidates come from": [
            ("name", "paper", "needs"),
            *((name, each.paper, each.needs or "nothing") for name, each in FRAMEWORKS.items()),
        ],
        detectors: [("name", "paper", "needs")],
        "Actions: what is done with kin": [("name", "effect"), *ACTIONS.items()],
    }
    for name, kind in DETECTORS.items():
        names = ", ".join((name, *(f"{name}:{variant}" for variant in kind.variants)))
        parts[detectors].append((names, kind.paper, kind.needs or "nothing"))
    for title, (columns, *rows) in parts.items():
        say(title, "bold")
        print_table(columns, rows, name_style="bold cyan")
    say_wrapped(
        "Compose: framework[+detector[:variant][:action]], as in simclr, sogclr+glofnd,"
        " moco+ring or simclr+oracle:attract (which is SupCon)"
    )
    say("Settings of framework and detector: --set framework.KEY=VALUE, --set detector.KEY=VALUE")


RECIPES_EPILOG = examples(
    "kinfolk recipes",
    "kinfolk recipes show simclr-cpu",
    "kinfolk train --recipe simclr-cpu --data IMAGES --out runs/first",
)


def recipes(
    action: Annotated[
        str, typer.Argument(metavar="[show]", help="show: print one recipe.")
    ] = "list",
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Name of the recipe to print.")
    ] = None,
) -> None:
    """List the recipes of the library, or print one with its header.

    A recipe is a YAML file with the settings of a training. Its header names paper, command,
    hardware, time and expected result.
    """
    from kinfolk.training.settings import recipe_names, recipe_path, recipe_summary

    if action == "show" and name is not None:
        say(recipe_path(name).read_text(encoding="utf-8").rstrip())
    elif action == "list":
        rows = [(each, recipe_summary(each)) for each in recipe_names()]
        print_table(("recipe", "what it trains"), rows)
    else:
        raise UsageError("write `kinfolk recipes` or `kinfolk recipes show NAME`")


SETTINGS_EPILOG = examples(
    "kinfolk settings", "kinfolk settings optimizer", "kinfolk settings data.cache_dir"
)


def settings(
    prefix: Annotated[
        str, typer.Argument(metavar="[PREFIX]", help="Section, key, or the beginning of one.")
    ] = "",
) -> None:
    """List every key of the configuration with its type, default and meaning.

    A key is set with `--set KEY=VALUE` of `kinfolk train`, or in a YAML file for `--config`.
    """
    from rich.padding import Padding
    from rich.text import Text

    from kinfolk.training.config import list_settings, sections

    found = list_settings(prefix)
    console = screen()
    for section, about in sections().items():
        rows = [setting for setting in found if setting.section == section]
        if rows:
            heading = Text.assemble((section or "no section", "bold"), (f": {about}", "dim"))
            console.print(heading, soft_wrap=False)
        for row in rows:
            about_value = (f"  {row.type}; default {row.default}", "dim")
            console.print(Text.assemble("  ", (row.key, "bold cyan"), about_value))
            console.print(Padding(Text(row.description), (0, 0, 0, 6)), soft_wrap=False)


DATA_EPILOG = examples(
    "kinfolk data digits", "kinfolk data photos/ --labels-from-folders --out scan/"
)
MAX_ROWS = 20


def data(
    source: Annotated[str, typer.Argument(metavar="DATA", help=SOURCE_HELP)],
    out: Annotated[
        Path | None,
        option("Folder for samples.parquet and quarantine.csv.", "--out", "-o", metavar="FOLDER"),
    ] = None,
    labels_from_folders: LabelsFromFolders = False,
    workers: Workers = None,
) -> None:
    """Read every image of a source and show splits, classes, sizes and files that cannot be
    read."""
    from kinfolk.data.open_source import open_source
    from kinfolk.data.prepare import prepare, write_quarantine

    opened = open_source(source, labels_from_folders=labels_from_folders)
    found = prepare(opened, image_size=32, workers=workers, cache_dir=None, progress=True)
    _show(found)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        found.samples.to_parquet(out / "samples.parquet")
        write_quarantine(found.quarantine, out / "quarantine.csv")


def _show(found: ImageData) -> None:
    from kinfolk.data.labels import captions_of

    console, samples = screen(), found.samples
    widths, heights = samples.widths, samples.heights
    sizes, most = (f"{widths.min()} × {heights.min()}", f"{widths.max()} × {heights.max()}")
    sizes += "" if sizes == most else f" to {most}"
    console.print(f"[bold]{plural(len(samples), 'image')}[/], {sizes} pixels")
    if samples.captions is not None and samples.group_ids is not None:
        count = sum(len(captions_of(caption)) for caption in samples.captions)
        groups = len(set(samples.group_ids.tolist()))
        console.print(
            f"{plural(count, 'caption')}, {plural(groups, 'group')}; samples that share an image,"
            " a caption or a group are never negatives"
        )
    rows: list[tuple[str, ...]] = []
    for split, number in Counter(samples.splits).items():
        labels = samples.of(split).labels
        labelled = "–" if labels is None else f"{int((labels >= 0).sum()):,}"
        rows.append((short(split), f"{number:,}", labelled))
    print_table(("split", "images", "labelled"), rows, right=("images", "labelled"))
    if samples.labels is not None:
        counts = Counter(int(label) for label in samples.labels if label >= 0).most_common()
        rows = [
            (short(samples.classes[label]) if samples.classes else str(label), f"{number:,}")
            for label, number in counts
        ]
        _print_first(("class", "images"), rows, "classes")
    if found.quarantine:
        rows = [(short(path), short(reason)) for path, reason in found.quarantine]
        _print_first(("refused", "reason"), rows, "refused files")


def _print_first(columns: tuple[str, ...], rows: list[tuple[str, ...]], what: str) -> None:
    print_table(columns, rows[:MAX_ROWS], right=("images",))
    if len(rows) > MAX_ROWS:
        screen().print(f"… and {len(rows) - MAX_ROWS:,} more {what}", style="dim")
