"""Where results are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kinfolk.data.images import ImageData


def screen() -> Console:
    """The console of results. Long lines, such as paths, are not broken."""
    from rich.console import Console

    return Console(soft_wrap=True, highlight=False)


def plain_table(*columns: str, right: tuple[str, ...] = (), title: str | None = None) -> Table:
    """A table with one rule below its head; the columns named in `right` hold numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def tell_refused(images: ImageData) -> None:
    """One line on stderr where pictures were refused, with the first of them."""
    from rich.console import Console

    from kinfolk.foreign import shown

    if images.quarantine:
        path, reason = (shown(text) for text in images.quarantine[0])
        number, total = len(images.quarantine), len(images) + len(images.quarantine)
        text = f"{number:,} of {total:,} images refused, the first is {path}: {reason}; `kinfolk data` lists them all"
        Console(stderr=True, soft_wrap=True).print(text, markup=False, highlight=False)
