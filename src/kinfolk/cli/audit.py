"""`kinfolk audit` finds the false negatives of any embedding, and `kinfolk advise` says what to do
about them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from kinfolk.auditing import Audit
    from kinfolk.auditing.audit_input import AuditInput

FINDING = "Finding"
TRYING = "Trying"
EPILOG = examples(
    "kinfolk audit photos/ --out audit/",
    "kinfolk audit features.npy --images photos/ --labels labels.csv --alpha 0.02",
    "kinfolk audit runs/photos --out audit/",
    "kinfolk audit sentences.csv --texts sentences.txt",
    "kinfolk audit photos/ --encoder timm/resnet50",
)
ADVISE_EPILOG = examples(
    "kinfolk advise photos/",
    "kinfolk advise photos/ --guide timm/resnet50",
    "kinfolk advise photos/ --guide runs/first",
    "kinfolk advise photos/ --labels-from-folders --try 30",
)

Out = Annotated[Path, typer.Option("--out", "-o", help="Folder to write.", rich_help_panel=DATA)]
Labels = Annotated[
    Path | None,
    typer.Option(
        help=(
            "Labels: .npy, .npz, .txt, or the column `label` of .csv, .tsv, .parquet, joined by a"
            " column such as `key` or `file`."
        ),
        rich_help_panel=DATA,
        show_default=False,
    ),
]
Alpha = Annotated[
    float,
    typer.Option(
        "--alpha",
        metavar="X",
        help="Share of each sample's similarities to flag.",
        rich_help_panel=FINDING,
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite", metavar=FLAG, help="Replace the audit in --out.", rich_help_panel=RUNNING
    ),
]


def audit(
    features: Annotated[
        str,
        typer.Argument(
            metavar="FEATURES|RUN|IMAGES",
            help=(
                "Features (.npy, .npz, .csv, .parquet, .safetensors, .pt), a run folder, or a"
                " folder of images."
            ),
            show_default=False,
        ),
    ],
    out: Out = Path("audit"),
    images: Annotated[
        str | None,
        typer.Option(
            "--images",
            metavar="DIR|TABLE",
            help="Images of the rows of a file of features, in their order.",
            rich_help_panel=DATA,
            show_default=False,
        ),
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|NAME",
            help=(
                "Embeds images: a run, torchvision/NAME or timm/NAME. [dim]Default: patches of the"
                " images.[/]"
            ),
            rich_help_panel=DATA,
            show_default=False,
        ),
    ] = None,
    labels: Labels = None,
    labels_from_folders: LabelsFromFolders = False,
    keys: Annotated[
        Path | None,
        typer.Option(
            help="Names of the rows: .txt, or the column `key` of a table.",
            rich_help_panel=DATA,
            show_default=False,
        ),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            help="Texts of the rows: .txt, or the column `text` of a table.",
            rich_help_panel=DATA,
            show_default=False,
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name of the features in a file with several arrays.",
            rich_help_panel=DATA,
        ),
    ] = None,
    alpha: Alpha = 0.01,
    pairs: Annotated[
        int,
        typer.Option(
            "--pairs",
            metavar="K",
            help="Largest number of flagged pairs to list for each anchor.",
            rich_help_panel=FINDING,
        ),
    ] = 10,
    near: Annotated[
        float,
        typer.Option(
            "--near",
            metavar="X",
            help=(
                "Near-duplicates without images: largest distance, relative to the median nearest"
                " neighbour."
            ),
            rich_help_panel=FINDING,
        ),
    ] = 0.1,
    batch_sizes: Annotated[
        str,
        typer.Option(
            metavar="N,N,…",
            help="Batch sizes to estimate false negatives for.",
            rich_help_panel=FINDING,
        ),
    ] = "64,128,256,512,1024,4096",
    search: Annotated[
        str,
        typer.Option(
            help="exact, approximate, or auto (exact up to 200,000 samples).",
            rich_help_panel=FINDING,
        ),
    ] = "auto",
    workers: Workers = None,
    overwrite: Overwrite = False,
    debug: Debug = False,
) -> None:
    """Find the samples that would be false negatives of each other, in any embedding.

    Writes pairs, thresholds, duplicates, likely label errors, outliers, hubs and a page. A folder
    of images is embedded first, by --encoder or by k-means of patches of the images. Nothing is
    trained.
    """
    from kinfolk.auditing import audit as run_audit
    from kinfolk.auditing.audit_input import open_input

    _check_out(out, overwrite)
    if labels_from_folders and images is None and not Path(features).is_dir():
        raise UsageError(
            "--labels-from-folders needs --images or a folder of images, whose folders are the"
            " classes"
        )
    sizes = _sizes(batch_sizes)
    with open_input(
        features,
        images=images,
        encoder=encoder,
        labels=labels,
        keys=keys,
        texts=texts,
        key=key,
        labels_from_folders=labels_from_folders,
        workers=workers,
    ) as found:
        result = run_audit(
            found.features,
            alpha,
            found.labels,
            pairs=pairs,
            key=key,
            keys=found.keys,
            texts=found.texts,
            images=found.images,
            search=search,  # type: ignore[arg-type]
            near=near,
            batch_sizes=sizes,
            views=found.views,
            progress=True,
        )
        _save(result, out, found)


def advise(
    data: Annotated[str, typer.Argument(metavar="DATA", help=SOURCE_HELP, show_default=False)],
    out: Out = Path("advice"),
    guide: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|NAME",
            help=(
                "Encoder to judge by: a run, torchvision/NAME or timm/NAME. [dim]Default:"
                " patches.[/]"
            ),
            rich_help_panel=DATA,
            show_default=False,
        ),
    ] = None,
    labels: Labels = None,
    labels_from_folders: LabelsFromFolders = False,
    alpha: Alpha = 0.01,
    minutes: Annotated[
        float | None,
        typer.Option(
            "--try",
            metavar="MINUTES",
            help="Train these methods on the data, in that time in all, and compare them.",
            rich_help_panel=TRYING,
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Setting of the trainings of --try. Can be repeated.",
            rich_help_panel=TRYING,
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Recipe of the trainings of --try.", rich_help_panel=TRYING, show_default=False
        ),
    ] = None,
    workers: Workers = None,
    overwrite: Overwrite = False,
    debug: Debug = False,
) -> None:
    """Say what false negatives your data may have, and which methods are worth a try.

    Embeds the images by --guide or by k-means of their patches, audits the embedding, and prints a
    verdict. Nothing is trained without --try. Repeat a command with --try to continue it, or to add
    seeds.
    """
    from kinfolk.auditing import audit as run_audit
    from kinfolk.auditing.audit_input import open_input
    from kinfolk.cli.advise import has_trial, try_methods
    from kinfolk.training.config import parse_settings

    common = parse_settings(settings or [])
    if labels_from_folders:
        common["data.labels_from_folders"] = True
    if minutes is None and (settings or recipe):
        raise UsageError("--set and --recipe are for the trainings of --try; give it, or leave out")
    if minutes is not None and minutes <= 0:
        raise UsageError(f"--try (={minutes:g}) must be above 0 minutes")
    if minutes is not None and has_trial(out) and not overwrite:
        return try_methods(data, out, minutes, common, recipe)
    _check_out(out, overwrite)
    encoder = str(guide) if guide is not None else None
    with open_input(
        data,
        encoder=encoder,
        labels=labels,
        labels_from_folders=labels_from_folders,
        workers=workers,
        as_images=True,
    ) as found:
        result = run_audit(
            found.features,
            alpha,
            found.labels,
            keys=found.keys,
            texts=found.texts,
            images=found.images,
            views=found.views,
            progress=True,
        )
        _save(result, out, found)
        if minutes is not None:
            _clear_trial(out)
            audited = result, found
            try_methods(data, out, minutes, common, recipe, audited, own_labels=labels is not None)


def _clear_trial(out: Path) -> None:
    """Removes the trial of an earlier advice that is replaced."""
    import shutil

    from kinfolk.cli.advise import FOLDER

    shutil.rmtree(out / FOLDER, ignore_errors=True)


def _check_out(out: Path, overwrite: bool) -> None:
    from kinfolk.auditing.result import WRITTEN

    existing = [name for name in WRITTEN if (out / name).exists()]
    if existing and not overwrite:
        raise UsageError(
            f"{out / existing[0]} exists; choose another folder with --out, or replace the audit"
            " with --overwrite"
        )
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out (={out}) is a file; give a folder")


def _sizes(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() for word in words):
        raise UsageError(
            f"--batch-sizes (={text}) must be whole numbers with commas, as in 128,256"
        )
    return [int(word) for word in words]


def _save(found: Audit, out: Path, given: AuditInput) -> None:
    from rich.text import Text

    from kinfolk.auditing.page import lead, tiles
    from kinfolk.auditing.verdict import verdict
    from kinfolk.cli.options import plain_table, screen
    from kinfolk.errors import printable

    found.save(out, given.thumbnails, given.origin)
    console = screen()
    console.print(Text(printable(lead(found, given.origin.encoder))), soft_wrap=False)
    table = plain_table("", "", "", right=())
    table.show_header = False
    for label, value, note in tiles(found):
        table.add_row(
            Text(printable(label)), Text(printable(value), "bold"), Text(printable(note), "dim")
        )
    console.print(table, soft_wrap=False)
    decided = verdict(found, given.origin)
    for sentence in decided.sentences:
        console.print(Text(printable(sentence)), soft_wrap=False)
    for purpose, command in decided.commands:
        console.print()
        console.print(Text(printable(f"{purpose}:"), "dim"), soft_wrap=False)
        console.print(f"  {command}", markup=False)
    console.print(f"\nPage: {out / 'audit.html'}", markup=False)
    if not given.origin.captions:
        use = f"kinfolk train --method {given.origin.framework}+known --known-kin"
        console.print(f"Pairs: {out / 'pairs.parquet'} (for `{use}`)", markup=False)
