"""What `kf.train` and `kinfolk train` share: the training, and the page about it."""

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
    """Learns an encoder from pictures, and leaves everything about it in the folder `out`, with a page to look at.

    Args:
        data: a folder, array file, table, archive, "digits", an array of pictures (N, H, W, 3), or a map-style `Dataset`.
        out: the run folder; must be new or empty unless `resume` or `overwrite`.
        method: `framework[+detector[:variant][:action]]`, e.g. "sogclr+glofnd"; by default "simclr".
        epochs, batch_size, seed: of the training; `batch_size` is over all devices together.
        recipe: a ready configuration to start from, by name or path. With a `method` other than its own, the settings of the parts that the
            method replaces are dropped.
        settings: any other key of the configuration: `{"optimizer.lr": 0.1}` or `["optimizer.lr=0.1"]`.
        resume: goes on with the run in `out`, exactly where its last checkpoint is; begins it where there is none. What is not given is
            taken from the run; what is given must agree with it.
        overwrite: replaces the run in `out`, and removes nothing there that no run wrote.
        progress: shows a bar, or lines where there is no terminal.
        report: writes `report.html`. Data handed over as arrays or a `Dataset` can't be read again, so its page has no map.

    Returns:
        The run; its `rank` is above 0 in the processes that helped rank zero.
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
