"""`kinfolk eval`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from kinfolk.cli.options import (
    DATA,
    LabelsFromFolders,
    RunsData,
    Workers,
    examples,
    flag,
    option,
    print_table,
    read_images,
    say,
)
from kinfolk.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kinfolk.data.images import ImageData
    from kinfolk.data.views import Views
    from kinfolk.embedding import LabelledFeatures
    from kinfolk.training.load_run import OpenedRun

LABEL_PROTOCOLS = ("knn", "linear", "semi", "finetune", "transfer", "clusters")
CAPTION_PROTOCOLS = ("retrieval", "zero-shot", "sts")
PROTOCOLS = (*LABEL_PROTOCOLS, "kin", *CAPTION_PROTOCOLS)
WEIGHTS = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".tar")
"""MoCo's end in .pth.tar."""
Probe = Literal["lbfgs", "glofnd", "ifnd", "ring", "rcl"]
PROBES = get_args(Probe)
SETTINGS = "Protocol settings"
EPILOG = examples(
    "kinfolk eval runs/digits",
    "kinfolk eval runs/photos --data labelled/ --labels-from-folders --protocol knn,linear,semi",
    "kinfolk eval runs/captions --data test.csv --protocol retrieval",
    "kinfolk eval runs/pairs --data sts.csv --protocol sts",
    "kinfolk eval other.pth --like runs/photos --protocol knn,linear",
)

_data = partial(option, panel=DATA)
_option = partial(option, panel=SETTINGS)
_imported = partial(option, panel="Imported weights")


def evaluate(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|WEIGHTS",
            help="Run folder, or a .safetensors, .pt or .pth file of another program.",
        ),
    ],
    data: RunsData = None,
    labels_from_folders: LabelsFromFolders = False,
    label_sets: Annotated[
        Path | None,
        _data("transfer: table with the columns image and label, one row per label.", exists=True),
    ] = None,
    protocol: Annotated[
        str,
        option(
            f"One or more, separated by commas: {', '.join(PROTOCOLS)}.",
            *("--protocol", "-p"),
            metavar="NAMES",
        ),
    ] = "knn,linear",
    seed: Annotated[int, option("Seed for held-out parts, drawn labels and augmentation.")] = 0,
    k: Annotated[int, _option("knn: number of neighbours.", "--k", min=1)] = 20,
    temperature: Annotated[float, _option("knn: temperature of the votes.")] = 0.1,
    probe: Annotated[Probe, _option("linear, semi: lbfgs, or the probe of a paper.")] = "lbfgs",
    unpooled: Annotated[
        bool,
        flag(
            "--unpooled", "Use features before average pooling, as in the tables of Ring.", SETTINGS
        ),
    ] = False,
    own_mean: Annotated[
        bool,
        flag(
            "--own-mean",
            "Normalise images by the mean and deviation of the data, as in the transfer of Ring.",
            SETTINGS,
        ),
    ] = False,
    percent: Annotated[
        str | None,
        option(
            "semi, finetune: shares of the labels in percent; default: 100,10,1,0.1 for semi, 10,1"
            " for finetune.",
            metavar="LIST",
            panel=SETTINGS,
        ),
    ] = None,
    subset: Annotated[
        list[Path] | None,
        _option(
            "semi, finetune: list of file names to use, such as SimCLR's 1percent.txt. Can be"
            " repeated.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    finetuning: Annotated[
        Literal["ifnd", "rcl"], _option("finetune: settings of a paper.")
    ] = "ifnd",
    epochs: Annotated[
        int | None,
        _option(
            "finetune: number of epochs; default: that of the paper, more with few labels.", min=1
        ),
    ] = None,
    metric: Annotated[
        Literal["top1", "mean-per-class", "map"] | None,
        _option("transfer: metric; default: from the name of the data."),
    ] = None,
    num_clusters: Annotated[
        int | None,
        _option("clusters: number of clusters; default: the number of classes.", min=1),
    ] = None,
    normaliser: Annotated[
        Literal["arithmetic", "geometric", "min", "max"],
        _option("clusters: mean of the entropies that NMI is divided by."),
    ] = "arithmetic",
    alpha: Annotated[
        float | None,
        _option(
            "kin: share of pairs above the exact quantile; default: that of the method, or 0.01.",
            min=0,
            max=1,
        ),
    ] = None,
    like: Annotated[
        Path | None,
        _imported("Take data, image size and normalisation from this run.", metavar="RUN"),
    ] = None,
    row_name: Annotated[
        str | None,
        _imported("Name in `kinfolk compare`; default: the name of the file.", "--name"),
    ] = None,
    out: Annotated[
        Path | None,
        _imported(
            "Folder to write; default: NAME-eval next to it.", *("--out", "-o"), metavar="FOLDER"
        ),
    ] = None,
    model: Annotated[
        str | None,
        _imported("Network, if it is not a ResNet: timm/NAME, torchvision/NAME."),
    ] = None,
    train_seed: Annotated[
        int | None,
        _imported("Seed of the training, to pair runs in `kinfolk compare`."),
    ] = None,
    workers: Workers = None,
) -> None:
    """Evaluate a run with the protocols of the papers. Results are written to RUN/eval/ and shown
    in the report.

    [bold]knn[/]        weighted nearest neighbours
    [bold]linear[/]     linear probe on frozen features
    [bold]semi[/]       linear probes on 100, 10, 1 and 0.1 % of the labels
    [bold]finetune[/]   the whole encoder trained on 10 and 1 % of the labels
    [bold]transfer[/]   logistic regression on another data set
    [bold]clusters[/]   k-means clusters compared with the labels
    [bold]kin[/]        quality of the method's false-negative detection
    [bold]retrieval[/], [bold]zero-shot[/]   for image–text runs and text pairs
    [bold]sts[/]        text pairs: similarities against the column `score` of a table

    Classifiers are fitted on the training split and tested on the test split.
    Without a test split, knn uses leave-one-out and the others test on a fifth of each class.
    The weights of the run never change.

    A file of weights is evaluated like a run, with the protocols from knn to clusters. The results
    are in a folder next to it, which `kinfolk compare` accepts.
    """
    names = list(dict.fromkeys(name.strip().lower() for name in protocol.split(",")))
    shares, lists = _shares(percent), subset or []
    for unknown in (name for name in names if name not in PROTOCOLS):
        hint = did_you_mean(unknown, PROTOCOLS, limit=1)
        raise UsageError(f"unknown protocol {unknown!r}{hint} (there are: {', '.join(PROTOCOLS)})")
    imported = {"like": like, "name": row_name, "model": model, "seed": train_seed, "out": out}
    imported = {key: value for key, value in imported.items() if value is not None}
    if run.is_file():
        source = data if like is None else None
        run = _import_weights(run, names, source, labels_from_folders, imported)
        data = None if like is None else data
    elif imported:
        raise UsageError(
            f"--like, --name, --model, --train-seed and --out are for a file of weights, and {run}"
            " is not a file; leave them out"
        )
    from kinfolk.embedding import take_parts
    from kinfolk.evaluation import protocols, retrieval
    from kinfolk.evaluation.gradient_training import FRACTIONS
    from kinfolk.evaluation.probes import read_label_sets
    from kinfolk.training.load_run import measure_kin, open_run

    opened = open_run(run)
    towers: Any = opened.towers() if {*names} & {*CAPTION_PROTOCOLS} else None
    images = read_images(opened, data, labels_from_folders, workers)
    if images.samples.captions is not None and images.samples.labels is None and "knn" in names:
        raise UsageError(
            "knn needs labels, and the data has texts without labels; evaluate this run with"
            " --protocol retrieval"
        )
    source = data or opened.config.data.source
    features = RunFeatures(opened, images, unpooled, own_mean)

    def transfer() -> dict[str, Any]:
        parts = features.parts
        if label_sets is not None:
            sets, _ = read_label_sets(label_sets, images.samples.keys)
            parts = take_parts(images, features.values, sets)
        before = protocols.read_results(opened.path).get("transfer")
        return protocols.run_transfer(
            parts, seed, str(source), metric, before, how=features.options()
        )

    def retrieve() -> dict[str, Any]:
        if images.texts is None:
            return retrieval.run_retrieval(towers, images, progress=True)
        return retrieval.run_pair_retrieval(towers, images, seed)

    run_protocol: dict[str, Callable[[], dict[str, Any]]] = {
        "knn": lambda: protocols.run_knn(features.parts, k, temperature),
        "linear": lambda: protocols.run_linear(features.parts, seed, probe),
        "semi": lambda: protocols.run_semi(
            features.parts,
            seed,
            probe,
            fractions=shares or (() if lists else FRACTIONS),
            lists=lists,
            keys=images.samples.keys,
        ),
        "finetune": lambda: protocols.run_finetune(
            opened.encoder(),
            images,
            features.views,
            features.parts,
            seed,
            fractions=shares or (() if lists else protocols.FINETUNED),
            settings=finetuning,
            epochs=epochs,
            lists=lists,
            progress=True,
        ),
        "transfer": transfer,
        "clusters": lambda: protocols.run_clusters(
            features.parts, num_clusters, normaliser=normaliser
        ),
        "kin": lambda: measure_kin(opened, images, seed, alpha=alpha, progress=True),
        "retrieval": retrieve,
        "zero-shot": lambda: retrieval.run_zero_shot(towers, images, progress=True),
        "sts": lambda: retrieval.run_sts(towers, images),
    }
    results = {}
    try:
        for name in names:
            found = run_protocol[name]()
            if name in LABEL_PROTOCOLS and name != "transfer":
                found |= features.options(pooling=name != "finetune")
            if "sets" not in found:  # which name the data of each
                found["data"] = source
            results[name] = found
            protocols.write_result(run, name, found)
    finally:  # shows finished results even if the next protocol fails
        if results:
            show_results(results)


class RunFeatures:
    """Computed once for all protocols."""

    def __init__(
        self, opened: OpenedRun, images: ImageData, unpooled: bool, own_mean: bool
    ) -> None:
        self.opened, self.images = opened, images
        self.unpooled, self.own_mean = unpooled, own_mean

    def options(self, pooling: bool = True) -> dict[str, str]:
        found = {"features": "before pooling"} if self.unpooled and pooling else {}
        return found | ({"normalised_by": "the data's own mean"} if self.own_mean else {})

    @cached_property
    def views(self) -> Views:
        from kinfolk.embedding import normalise_by

        views = self.opened.views()
        return normalise_by(self.images, views) if self.own_mean else views

    @cached_property
    def values(self) -> NDArray[np.float32]:
        return self.opened.features(
            self.images, views=self.views, unpooled=self.unpooled, progress=True
        )

    @cached_property
    def parts(self) -> LabelledFeatures:
        """Data without labels is refused before it is embedded."""
        from kinfolk.embedding import require_labels, take_parts

        require_labels(self.images.samples.labels)
        return take_parts(self.images, self.values)


def _import_weights(
    file: Path, names: list[str], data: str | None, from_folders: bool, options: dict[str, Any]
) -> Path:
    from kinfolk.training.foreign_weights import import_weights

    if file.suffix.lower() not in WEIGHTS:
        raise UsageError(
            f"{file} is neither a run folder nor a file of weights ({', '.join(WEIGHTS)})"
        )
    if others := [name for name in names if name not in LABEL_PROTOCOLS]:
        raise UsageError(
            f"--protocol {others[0]} needs a run of kinfolk, and {file} is a file of weights"
        )
    folder, network = import_weights(
        file, data=data, labels_from_folders=from_folders, progress=True, **options
    )
    say(f"{file}: {network.describe()}; results in {folder}")
    return folder


def _shares(percent: str | None) -> list[float]:
    try:
        shares = [float(text) / 100 for text in (percent or "100").split(",")]
    except ValueError:
        shares = [0]
    if not all(0 < share <= 1 for share in shares):
        raise UsageError(
            f"--percent (={percent}) must be numbers above 0 and at most 100, separated by commas,"
            " such as 100,10,1"
        )
    return [] if percent is None else shares


def show_results(results: Mapping[str, Mapping[str, Any]]) -> None:
    from kinfolk.report.results import result_rows

    print_table(("figure", "result", "measured on"), result_rows(results), right=("result",))
