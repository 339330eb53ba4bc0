"""`kinfolk train`: trains an encoder on images or text pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kinfolk.cli.options import (
    DATA,
    FLAG,
    RUNNING,
    SOURCE_HELP,
    Debug,
    LabelsFromFolders,
    Workers,
    examples,
)
from kinfolk.errors import UsageError

TRAINING = "Training"
EPILOG = examples(
    "kinfolk train --data digits --out runs/digits --epochs 20",
    "kinfolk train --data photos/ --out runs/g --method simclr+guide:attract --guide timm/resnet50",
    "kinfolk train --recipe demo-digits --out runs/demo",
    "kinfolk train --recipe demo-digits --method sogclr --out runs/base",
    "kinfolk train --data pairs.csv --out runs/pairs --method pairs+glofnd",
    "kinfolk train --out runs/photos --resume",
)


def train(
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="Run folder to write.", rich_help_panel=DATA, show_default=False
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option("--data", "-d", help=SOURCE_HELP, rich_help_panel=DATA, show_default=False),
    ] = None,
    labels_from_folders: LabelsFromFolders = False,
    exclude: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Samples to leave out: .csv with the column `key`, as marked.csv of an audit.",
            rich_help_panel=DATA,
            show_default=False,
        ),
    ] = None,
    image_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=(
                "Side of the views in pixels. [dim]Default: that of the images, up to 224, on a CPU"
                " up to 64.[/]"
            ),
            rich_help_panel=DATA,
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            "-m",
            help=(
                "Such as simclr, simclr+glofnd, simclr+guide:attract; see `kinfolk methods`."
                " [dim]Default: simclr.[/]"
            ),
            rich_help_panel=TRAINING,
        ),
    ] = None,
    known_kin: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Pairs from `kinfolk audit` for +known (.parquet or .csv).",
            rich_help_panel=TRAINING,
            show_default=False,
        ),
    ] = None,
    guide: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=(
                "Features for +guide: .npy, .safetensors, a run folder, timm/NAME,"
                " torchvision/NAME, patches (from these images alone); for text pairs st/NAME."
            ),
            rich_help_panel=TRAINING,
            show_default=False,
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            "--config",
            help="Start from a recipe: a name or a YAML file; see `kinfolk recipes`.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help=(
                "resnet10, resnet18, …, torchvision/NAME, timm/NAME; for text pairs st/NAME."
                " [dim]Default: resnet18, on a CPU resnet10.[/]"
            ),
            rich_help_panel=TRAINING,
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of epochs. [dim]Default: 100, on a CPU 30.[/]",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=(
                "Samples per step, over all devices. [dim]Default: 256, less for fewer than 2,048"
                " samples.[/]"
            ),
            rich_help_panel=TRAINING,
        ),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Learning rate before scaling. [dim]Default: 0.003, with captions 0.001.[/]",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Temperature of the loss. [dim]Default: that of the framework.[/]",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Random seed. [dim]Default: 0.[/]", rich_help_panel=TRAINING
        ),
    ] = None,
    init: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Initial weights: .safetensors or a state dict.",
            rich_help_panel=TRAINING,
            show_default=False,
        ),
    ] = None,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE",
            help="Module or .py file that registers own detectors or frameworks; repeatable.",
            rich_help_panel=TRAINING,
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any other setting. Can be repeated.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="Number of devices, or auto. [dim]Default: auto, all GPUs.[/]",
            rich_help_panel=RUNNING,
        ),
    ] = None,
    num_nodes: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Number of machines. [dim]Default: 1.[/]", rich_help_panel=RUNNING
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="Lightning strategy, e.g. ddp. [dim]Default: auto.[/]", rich_help_panel=RUNNING
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="auto, 32, bf16-mixed, 16-mixed. [dim]Default: auto.[/]", rich_help_panel=RUNNING
        ),
    ] = None,
    compile: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            metavar=FLAG,
            help="Compile the loss with torch.compile. [dim]Default: on a GPU.[/]",
            rich_help_panel=RUNNING,
        ),
    ] = None,
    compile_encoder: Annotated[
        bool | None,
        typer.Option(
            "--compile-encoder/--no-compile-encoder",
            metavar=FLAG,
            help="Compile the encoder with torch.compile. [dim]Default: on a GPU.[/]",
            rich_help_panel=RUNNING,
            show_default=False,
        ),
    ] = None,
    workers: Workers = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", metavar=FLAG, help="Continue the run in --out.", rich_help_panel=RUNNING
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", metavar=FLAG, help="Replace the run in --out.", rich_help_panel=RUNNING
        ),
    ] = False,
    no_report: Annotated[
        bool,
        typer.Option(
            "--no-report", metavar=FLAG, help="Do not write report.html.", rich_help_panel=RUNNING
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Train an encoder on images or on text pairs.

    Labels are used only for the kNN accuracy and the false-negative metrics, unless the method has
    the oracle detector; ifnd counts their classes.
    """
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other; give only one")
    if (
        known_kin is not None
        and (method is None or "+known" not in method.lower())
        and not (method is None and (resume or recipe))
    ):
        raise UsageError(
            "--known-kin needs a method with the detector `known`, such as --method"
            f" {(method or 'simclr').partition('+')[0]}+known"
        )
    if (
        guide is not None
        and (method is None or "+guide" not in method.lower())
        and not (method is None and (resume or recipe))
    ):
        raise UsageError(
            "--guide needs a method with the detector `guide`, such as --method"
            f" {(method or 'simclr').partition('+')[0]}+guide"
        )
    flags: dict[str, Any] = {
        "detector.pairs": None if known_kin is None else str(known_kin),
        "detector.features": guide,
        "data.labels_from_folders": labels_from_folders or None,
        "data.exclude": None if exclude is None else str(exclude),
        "data.workers": workers,
        "views.size": image_size,
        "model.name": model,
        "model.init": None if init is None else str(init),
        "optimizer.lr": lr,
        "framework.temperature": temperature,
        "plugins": plugin or None,
        "trainer.devices": int(devices) if devices is not None and devices.isdecimal() else devices,
        "trainer.num_nodes": num_nodes,
        "trainer.strategy": strategy,
        "trainer.precision": precision,
        "trainer.compile": compile,
        "trainer.compile_encoder": compile_encoder,
    }
    from kinfolk.api import train as train_run
    from kinfolk.training.config import parse_settings

    given = {key: value for key, value in flags.items() if value is not None} | parse_settings(
        settings or []
    )
    run = train_run(
        data,
        out,
        method=method,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        recipe=recipe,
        settings=given,
        resume=resume,
        overwrite=overwrite,
        report=not no_report,
    )
    if run.rank == 0 and not no_report and not run.unchanged:
        from kinfolk.cli.options import screen

        screen().print(f"Report: {run.path / 'report.html'}", markup=False)
