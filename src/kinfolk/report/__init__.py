"""The report: what a run did, on one page that works from disk."""

from kinfolk.report.write import write_report

__all__ = ["write_report"]
