"""`kinfolk report`: writes the page of a run."""

from __future__ import annotations

from kinfolk.cli.options import Debug, RunFolder, RunsData, examples

EPILOG = examples("kinfolk report runs/photos")


def report(
    run: RunFolder,
    data: RunsData = None,
    debug: Debug = False,
) -> None:
    """Write RUN/report.html: what was run, curves, results, anchors with their kin, maps, views.

    One file that works from disk. It embeds up to 5,000 samples with the run's encoder for the map, and asks the detector of the last
    checkpoint who is kin among them; where pictures or checkpoint can't be read, the page and the screen say so.
    """
    from kinfolk.cli.options import screen
    from kinfolk.errors import printable
    from kinfolk.report import write_report
    from kinfolk.training.load_run import open_run

    pictures = None if data is None else open_run(run).data(data, progress=True)
    path = write_report(run, pictures, progress=True, tell=lambda text: screen().print(printable(text), markup=False))
    screen().print(f"Report: {path}", markup=False, highlight=False)
