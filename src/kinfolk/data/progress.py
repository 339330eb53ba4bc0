"""A progress bar, where there is a terminal to show it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

Value = TypeVar("Value")


def show_progress(values: Iterable[Value], total: int, title: str, *, enabled: bool) -> Iterator[Value]:
    """Passes `values` on and shows on standard error how many of `total` have passed; the bar goes when it is done."""
    if not enabled:
        yield from values
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield from values
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total)
        for value in values:
            yield value
            bar.advance(task)
