"""`kinfolk audit` and `kinfolk advise`."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kinfolk.cli.options import (
    DATA,
    SOURCE_HELP,
    LabelsFromFolders,
    Workers,
    examples,
    option,
    overwrite_option,
    plain_table,
    require_new,
    say,
    say_wrapped,
    screen,
)
from kinfolk.errors import UsageError, printable

if TYPE_CHECKING:
    from kinfolk.auditing import Audit
    from kinfolk.auditing.inputs import AuditInput
    from kinfolk.sweeping import Trial

_data_option = partial(option, panel=DATA)
_option = partial(option, panel="Finding")
_trying = partial(option, panel="Trying")
EPILOG = examples(
    "kinfolk audit photos/ --out audit/",
    "kinfolk audit features.npy --images photos/ --labels labels.csv --alpha 0.02",
    "kinfolk audit runs/photos --out audit/",
)
ADVISE_EPILOG = examples(
    "kinfolk advise photos/",
    "kinfolk advise photos/ --labels-from-folders --try 30",
    "kinfolk advise pairs.csv --guide st/all-MiniLM-L6-v2 --try 30",
)

Out = Annotated[Path, _data_option("Folder to write.", "--out", "-o", metavar="FOLDER")]
Labels = Annotated[
    Path | None,
    _data_option(
        "Labels: .npy, .txt, or the column `label` of .csv, .tsv, .parquet, joined by a"
        " column such as `key` or `file`.",
    ),
]
Alpha = Annotated[float, _option("Share of each sample's similarities to flag.")]
Overwrite = Annotated[bool, overwrite_option("the audit in --out")]
ENCODER = (
    "a run, torchvision/NAME, timm/NAME, or st/NAME for texts; default: patches of the images."
)


def audit(
    features: Annotated[
        str,
        typer.Argument(
            metavar="FEATURES|RUN|IMAGES",
            help="Features (.npy, .npz, .parquet, .safetensors, .pt), a run folder, or a"
            " folder of images.",
        ),
    ],
    out: Out = Path("audit"),
    images: Annotated[
        str | None,
        _data_option(
            "Images of the rows of a file of features, in their order.", metavar="FOLDER|TABLE"
        ),
    ] = None,
    encoder: Annotated[
        str | None, _data_option(f"Embeds images: {ENCODER}", metavar="RUN|NAME")
    ] = None,
    labels: Labels = None,
    labels_from_folders: LabelsFromFolders = False,
    texts: Annotated[
        Path | None, _data_option("Texts of the rows: .txt, or the column `text` of a table.")
    ] = None,
    key: Annotated[
        str | None, _data_option("Name of the features in a file with several arrays.")
    ] = None,
    alpha: Alpha = 0.01,
    pairs: Annotated[
        int, _option("Largest number of flagged pairs to list for each anchor.", metavar="K")
    ] = 10,
    workers: Workers = None,
    overwrite: Overwrite = False,
) -> None:
    """Find the samples that would be false negatives of each other, in any embedding.

    Writes pairs, thresholds, duplicates, likely label errors, hubs and a page. A folder of images
    is embedded first, by --encoder or by k-means of patches of the images. Nothing is trained.
    """
    from kinfolk.auditing.inputs import read_input

    _check_out(out, overwrite)
    if labels_from_folders and images is None and not Path(features).is_dir():
        raise UsageError(
            "--labels-from-folders needs --images or a folder of images, whose folders are the"
            " classes"
        )
    found = read_input(
        features,
        images=images,
        encoder=encoder,
        labels=labels,
        texts=texts,
        key=key,
        labels_from_folders=labels_from_folders,
        workers=workers,
    )
    _audit(found, out, alpha, pairs)


def advise(
    data: Annotated[str, typer.Argument(metavar="DATA", help=SOURCE_HELP)],
    out: Out = Path("advice"),
    guide: Annotated[
        str | None, _data_option(f"Encoder of the audit: {ENCODER}", metavar="RUN|NAME")
    ] = None,
    labels: Labels = None,
    labels_from_folders: LabelsFromFolders = False,
    alpha: Alpha = 0.01,
    minutes: Annotated[
        float | None,
        _trying(
            "Train these methods for MINUTES in total and compare them.",
            "--try",
            metavar="MINUTES",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        _trying(
            "Setting of the trainings of --try. Can be repeated.", "--set", metavar="KEY=VALUE"
        ),
    ] = None,
    recipe: Annotated[str | None, _trying("Recipe of the trainings of --try.")] = None,
    workers: Workers = None,
    overwrite: Overwrite = False,
) -> None:
    """Estimate the false negatives in your data, and name the methods that are worth a try.

    Embeds the images by --guide or by k-means of their patches, audits the embedding, and prints a
    verdict. Nothing is trained without --try. Repeat a command with --try to continue it, or to add
    seeds.
    """
    from kinfolk.auditing.inputs import read_input
    from kinfolk.sweeping import PLAN
    from kinfolk.training.config import parse_settings

    common = parse_settings(settings or [])
    if labels_from_folders:
        common["data.labels_from_folders"] = True
    if minutes is None and (settings or recipe):
        raise UsageError("--set and --recipe are for the trainings of --try; give it, or leave out")
    if minutes is not None and minutes <= 0:
        raise UsageError(f"--try (={minutes:g}) must be above 0 minutes")
    if minutes is not None and (out / TRIAL / PLAN).is_file() and not overwrite:
        return try_methods(data, out, minutes, common, recipe)
    _check_out(out, overwrite)
    found = read_input(
        data,
        encoder=guide,
        labels=labels,
        labels_from_folders=labels_from_folders,
        workers=workers,
        as_images=True,
    )
    result = _audit(found, out, alpha)
    if minutes is not None:
        shutil.rmtree(out / TRIAL, ignore_errors=True)
        audited = result, found
        try_methods(data, out, minutes, common, recipe, audited, has_file=labels is not None)


def _check_out(out: Path, overwrite: bool) -> None:
    from kinfolk.auditing.run_audit import WRITTEN

    for name in WRITTEN:
        require_new(out / name, overwrite, "folder")
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out (={out}) is a file; give a folder")


def _audit(given: AuditInput, out: Path, alpha: float, pairs: int = 10) -> Audit:
    from rich.text import Text

    from kinfolk.auditing import audit as run_audit
    from kinfolk.auditing.page import audit_tiles, lead
    from kinfolk.auditing.verdict import verdict

    found = run_audit(
        given.features,
        alpha,
        given.labels,
        pairs=pairs,
        keys=given.keys,
        texts=given.texts,
        images=given.images,
        views=given.views,
        progress=True,
    )
    found.save(out, given.thumbnails, given.origin)
    origin = given.origin
    say_wrapped(lead(found, origin.encoder))
    table = plain_table("", "", "")
    table.show_header = False
    for texts in audit_tiles(found):
        table.add_row(*map(Text, map(printable, texts), ("", "bold", "dim")))
    screen().print(table, soft_wrap=False)
    result = verdict(found, origin)
    for sentence in result.sentences:
        say_wrapped(sentence)
    for purpose, command in result.commands:
        say(f"\n{purpose}:", "dim")
        say(f"  {command}")
    say(f"\nPage: {out / 'audit.html'}")
    if not origin.captions:
        use = f"kinfolk train --method {origin.framework}+known --known-kin"
        say(f"Pairs: {out / 'pairs.parquet'} (for `{use}`)")
    return found


TRIAL, GUIDE, LABELS = "try", "guide.npy", "labels.npy"


def try_methods(
    data: str,
    out: Path,
    minutes: float,
    settings: Mapping[str, Any],
    recipe: str | None,
    audited: tuple[Audit, AuditInput] | None = None,
    has_file: bool = False,
) -> None:
    """Starts a trial on what was audited, or continues the one in `out`. `has_file`: the labels
    come from a file of the user, not from the data."""
    import numpy as np

    from kinfolk.auditing.verdict import Candidate, candidates
    from kinfolk.sweeping import run_trial

    folder, methods = out / TRIAL, list[Candidate]()
    if audited is not None:
        audit, given = audited
        origin = given.origin
        if origin.captions and origin.framework != "pairs":
            raise UsageError("--try compares methods for images, not for images with captions")
        if origin.captions and not origin.has_labels:
            raise UsageError(
                f"--try compares methods for text pairs by labels; give `{data}` a column `label`"
            )
        if origin.model is not None:
            settings = {"model.name": origin.model, **settings}
        folder.mkdir(parents=True, exist_ok=True)
        methods = candidates(audit, origin)
        if len(methods) == 1:  # the audited features may tell less than those of the encoder
            base = methods[0].method
            methods.append(Candidate("", "glofnd", f"{base}+glofnd", {"detector.alpha": 0.01}))
        np.save(folder / GUIDE, np.asarray(given.features, dtype=np.float16))
        for place, each in enumerate(methods):  # the audited features instead of their name
            named = each.settings.get("detector.features")
            if named is not None and named == origin.guide:
                changed = {**each.settings, "detector.features": str(folder / GUIDE)}
                methods[place] = replace(each, settings=changed)
        if has_file and given.labels is not None:
            names = [name for name in dict.fromkeys(given.labels) if name is not None]
            numbers = {None: -1, **{name: number for number, name in enumerate(names)}}
            np.save(folder / LABELS, [numbers[name] for name in given.labels])
    labels = np.load(folder / LABELS) if (folder / LABELS).exists() else None
    show_trial(
        run_trial(
            data, folder, methods, minutes=minutes, settings=settings, recipe=recipe, labels=labels
        )
    )


def show_trial(trial: Trial) -> None:
    from kinfolk.cli.compare import show_comparison
    from kinfolk.sweeping import CRITERIA

    plan = trial.plan
    say("")
    if trial.table is None:
        return say_wrapped(trial.verdict(), "bold")
    show_comparison(trial.table)
    say_wrapped(f"{plan.criterion}: {CRITERIA[plan.criterion]}.", "dim")
    say("")
    say_wrapped(trial.verdict(), "bold")
    data = shlex.quote(plan.data)
    for key, value in plan.settings.items():
        options = {
            "data.labels_from_folders": "--labels-from-folders",
            "model.name": f"--model {shlex.quote(str(value))}",
        }
        data += " " + options.get(key, f"--set {shlex.quote(f'{key}={value}')}")
    data += "" if plan.recipe is None else f" --recipe {shlex.quote(plan.recipe)}"
    say("\nThe long run:", "dim")
    say(f"  {(trial.best or plan.candidates[0]).command(data)}")
