"""`kf.train`, which `kinfolk train` calls too: the training, followed by the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kinfolk.report import write_report
from kinfolk.training.train import train as train_run

if TYPE_CHECKING:
    import os

    from kinfolk.training.run_folder import Run
    from kinfolk.training.train import Data


def train(
    data: Data | None = None,
    out: str | os.PathLike[str] | None = None,
    *,
    method: str | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    recipe: str | os.PathLike[str] | None = None,
    settings: Sequence[str] | Mapping[str, Any] = (),
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    report: bool = True,
) -> Run:
    """Trains an encoder on images and writes a run folder with the encoder, metrics, checkpoints and a report.

    Args:
        data: a folder, array file, table, archive, "digits", an array of images (N, H, W, 3), or a map-style `Dataset`.
        out: the run folder; must be new or empty unless `resume` or `overwrite`.
        method: `framework[+detector[:variant][:action]]`, e.g. "sogclr+glofnd"; by default "simclr".
        epochs, batch_size, seed: settings of the training; `batch_size` is the total over all devices.
        recipe: a ready configuration to start from, by name or path. With another `method` than that of the recipe, settings of the
            replaced parts are dropped.
        settings: any other key of the configuration: `{"optimizer.lr": 0.1}` or `["optimizer.lr=0.1"]`.
        resume: continues the run in `out` exactly from its last checkpoint, or starts it if there is none. Settings that are not given
            are those of the run; given ones must agree with it.
        overwrite: replaces the run in `out`. Files that no run wrote are kept.
        progress: shows a progress bar, or lines if there is no terminal.
        report: writes `report.html`. Data passed as an array or a `Dataset` cannot be read again, so its report has no map.

    Returns:
        The run. Its `rank` is above 0 in processes other than rank zero.
    """
    run = train_run(
        data,
        out,
        method=method,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        recipe=recipe,
        settings=settings,
        resume=resume,
        overwrite=overwrite,
        progress=progress,
    )
    if report and run.rank == 0:
        write_report(run.path, progress=progress)
    return run
