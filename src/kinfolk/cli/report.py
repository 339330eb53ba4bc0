"""`kinfolk report`: writes the page of a run."""

from __future__ import annotations

from kinfolk.cli.options import Debug, RunFolder, examples

EPILOG = examples("kinfolk report runs/photos")


def report(run: RunFolder, debug: Debug = False) -> None:
    """Write RUN/report.html: what was run, curves, results, map, views.

    One file that works from disk. It embeds up to 5,000 samples with the run's encoder for the map.
    """
    from kinfolk.cli.console import screen
    from kinfolk.report import write_report

    screen().print(f"Report: {write_report(run, progress=True)}", markup=False, highlight=False)
