"""`kinfolk train`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from kinfolk.cli.options import (
    DATA,
    SOURCE_HELP,
    TRAINING,
    NoReport,
    Recipe,
    Settings,
    examples,
    flag,
    option,
    overwrite_option,
    say,
    with_settings,
)
from kinfolk.errors import UsageError

_option = partial(option, panel=TRAINING)
EPILOG = examples(
    "kinfolk train --data digits --out runs/digits --epochs 20",
    "kinfolk train --data photos/ --out runs/g --method simclr+guide:attract --guide timm/resnet50",
    "kinfolk train --recipe demo-digits --out runs/demo",
    "kinfolk train --data pairs.csv --out runs/pairs --method pairs+glofnd",
    "kinfolk train --out runs/photos --resume",
)
SETTINGS = {
    "--labels-from-folders": "data.labels_from_folders",
    "--exclude": "data.exclude",
    "--method -m": "method",
    "--epochs": "epochs",
    "--batch-size": "batch_size",
    "--image-size": "views.size",
    "--model": "model.name",
    "--init": "model.init",
    "--lr": "optimizer.lr",
    "--seed": "seed",
    "--plugin": "plugins",
    "--devices": "trainer.devices",
    "--num-nodes": "trainer.num_nodes",
    "--precision": "trainer.precision",
    "--compile/--no-compile": "trainer.compile",
    "--compile-encoder/--no-compile-encoder": "trainer.compile_encoder",
    "--workers": "data.workers",
}
"""Options whose type and description are those of a setting."""


@with_settings(SETTINGS)
def train(
    *,
    out: Annotated[Path, option("Run folder to write.", "--out", "-o", metavar="RUN", panel=DATA)],
    data: Annotated[
        str | None, option(SOURCE_HELP, "--data", "-d", metavar="DATA", panel=DATA)
    ] = None,
    chosen: Mapping[str, Any],
    recipe: Recipe = None,
    known_kin: Annotated[
        str | None,
        _option("Pairs from `kinfolk audit` for +known (.parquet or .csv).", metavar="FILE"),
    ] = None,
    guide: Annotated[
        str | None,
        _option(
            "Features for +guide: .npy, .safetensors, a run folder, timm/NAME, torchvision/NAME,"
            " patches (from these images alone); for text pairs st/NAME.",
            metavar="FILE|RUN|NAME",
        ),
    ] = None,
    temperature: Annotated[
        float | None, _option("Temperature of the loss; default: that of the framework.")
    ] = None,
    settings: Settings = None,
    resume: Annotated[bool, flag("--resume", "Continue the run in --out.")] = False,
    overwrite: Annotated[bool, overwrite_option("the run in --out")] = False,
    no_report: NoReport = False,
) -> None:
    """Train an encoder on images or on text pairs.

    Labels are used only for the kNN accuracy and the false-negative metrics, unless the method has
    the oracle detector; ifnd counts their classes.
    """
    method = chosen.get("method", "simclr")
    is_stored = "method" not in chosen and (resume or recipe is not None)
    for name, detector, value in (("--known-kin", "known", known_kin), ("--guide", "guide", guide)):
        if value is not None and not is_stored and f"+{detector}" not in method.lower():
            raise UsageError(
                f"{name} needs a method with the detector `{detector}`, such as --method"
                f" {method.partition('+')[0]}+{detector}"
            )
    given = {
        "detector.pairs": known_kin,
        "detector.features": guide,
        "framework.temperature": temperature,
    }
    given = {key: value for key, value in given.items() if value is not None}
    from kinfolk.api import train as train_run
    from kinfolk.training.config import parse_settings

    run = train_run(
        data,
        out,
        recipe=recipe,
        settings={**chosen, **given, **parse_settings(settings or [])},
        resume=resume,
        overwrite=overwrite,
        report=not no_report,
    )
    if run.rank == 0 and not no_report and not run.unchanged:
        say(f"Report: {run.path / 'report.html'}")
