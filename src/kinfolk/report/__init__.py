"""The report of a run: one HTML page that works from disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kinfolk.report.page import write_report

__all__ = ["write_report"]


def __getattr__(name: str) -> Any:
    """Reading the small files of a run needs no torch."""
    if name != "write_report":
        raise AttributeError(f"module 'kinfolk.report' has no attribute {name!r}")
    from kinfolk.report.page import write_report

    return write_report
