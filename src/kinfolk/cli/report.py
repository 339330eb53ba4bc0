"""`kinfolk report` writes the page of a run."""

from __future__ import annotations

from kinfolk.cli.options import Debug, RunFolder, RunsData, examples

EPILOG = examples("kinfolk report runs/photos")


def report(
    run: RunFolder,
    data: RunsData = None,
    debug: Debug = False,
) -> None:
    """Write RUN/report.html: settings, curves, results, anchors with their kin, embedding map and views.

    The page is one file that works from disk. Up to 5,000 samples are embedded with the run's encoder for the map, and the detector of the
    last checkpoint is applied to them. If the images or the checkpoint can't be read, the page and the terminal give the reason.
    """
    from kinfolk.cli.options import screen
    from kinfolk.errors import printable
    from kinfolk.report import write_report
    from kinfolk.training.load_run import open_run

    images = None if data is None else open_run(run).data(data, progress=True)
    path = write_report(run, images, progress=True, on_missing=lambda text: screen().print(printable(text), markup=False))
    screen().print(f"Report: {path}", markup=False, highlight=False)
