"""`kinfolk eval`: evaluates the encoder of a run with labels, and prints a table of the results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kinfolk.cli.options import DATA, FLAG, Debug, LabelsFromFolders, RunsData, Workers, examples
from kinfolk.errors import UsageError, did_you_mean

LABEL_PROTOCOLS = ("knn", "linear", "semi", "finetune", "transfer", "clusters")
CAPTION_PROTOCOLS = ("retrieval", "zero-shot", "sts")
PROTOCOLS = (*LABEL_PROTOCOLS, "kin", *CAPTION_PROTOCOLS)
WEIGHTS = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".tar")
"""Endings of files of weights; MoCo's end in .pth.tar."""
PROBES = ("lbfgs", "glofnd", "ifnd", "ring", "rcl")
FINETUNINGS = ("ifnd", "rcl")
NORMALISERS = ("arithmetic", "geometric", "min", "max")
METRIC_NAMES = ("top1", "mean-per-class", "map")
_data_option = partial(typer.Option, rich_help_panel=DATA, show_default=False)
_option = partial(typer.Option, rich_help_panel="Protocol settings")
_option_without_default = partial(_option, show_default=False)
_weights_option = partial(
    typer.Option, rich_help_panel="Weights from elsewhere", show_default=False
)
EPILOG = examples(
    "kinfolk eval runs/digits",
    "kinfolk eval runs/photos --data labelled/ --labels-from-folders --protocol knn,linear,semi",
    "kinfolk eval runs/photos --protocol finetune --percent 10",
    "kinfolk eval runs/imagenet --protocol finetune --subset 1percent.txt --subset 10percent.txt"
    " --finetuning rcl",
    "kinfolk eval runs/photos --data pets/ --labels-from-folders --protocol transfer",
    "kinfolk eval runs/cifar100 --hierarchy cifar100 --depth 1 --protocol linear,clusters",
    "kinfolk eval runs/captions --data test.csv --protocol retrieval",
    "kinfolk eval runs/pairs --protocol knn,retrieval",
    "kinfolk eval runs/pairs --data sts.csv --protocol sts",
    "kinfolk eval rival.pth --like runs/photos --protocol knn,linear",
)


def evaluate(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|WEIGHTS",
            help="Run folder, or a .safetensors, .pt or .pth file of another program.",
            show_default=False,
        ),
    ],
    data: RunsData = None,
    labels_from_folders: LabelsFromFolders = False,
    hierarchy: Annotated[
        str | None,
        _data_option(
            help="Table of child and parent classes, or cifar100. [dim]Default: the run's.[/]"
        ),
    ] = None,
    depth: Annotated[
        int | None,
        _data_option(
            metavar="N", min=0, help="Use the labels at this depth of the hierarchy. 0 is the root."
        ),
    ] = None,
    label_sets: Annotated[
        Path | None,
        _data_option(
            metavar="FILE",
            help="transfer: table with the columns image and label, one row per label.",
        ),
    ] = None,
    protocol: Annotated[
        str,
        typer.Option(
            "--protocol",
            "-p",
            metavar="NAMES",
            help=f"One or more, separated by commas: {', '.join(PROTOCOLS)}.",
        ),
    ] = "knn,linear",
    seed: Annotated[
        int,
        typer.Option(metavar="N", help="Seed for held-out parts, drawn labels and augmentation."),
    ] = 0,
    k: Annotated[int, _option("--k", metavar="N", min=1, help="knn: number of neighbours.")] = 20,
    temperature: Annotated[
        float, _option(metavar="T", help="knn: temperature of the votes.")
    ] = 0.1,
    probe: Annotated[
        str,
        _option(
            metavar="NAME",
            help="linear, semi: lbfgs, or the probe of a paper (glofnd, ifnd, ring, rcl).",
        ),
    ] = "lbfgs",
    unpooled: Annotated[
        bool,
        _option(
            "--unpooled",
            metavar=FLAG,
            help="Use features before average pooling, as in the tables of Ring.",
        ),
    ] = False,
    own_mean: Annotated[
        bool,
        _option(
            "--own-mean",
            metavar=FLAG,
            help=(
                "Normalise images by the mean and deviation of the data, as in the transfer of"
                " Ring."
            ),
        ),
    ] = False,
    percent: Annotated[
        str | None,
        _option_without_default(
            metavar="LIST",
            help=(
                "semi, finetune: shares of the labels in percent. [dim]Default: 100,10,1,0.1 for"
                " semi, 10,1 for finetune.[/]"
            ),
        ),
    ] = None,
    subset: Annotated[
        list[Path] | None,
        _option_without_default(
            metavar="FILE",
            help=(
                "semi, finetune: list of file names to use, such as SimCLR's 1percent.txt. Can be"
                " repeated."
            ),
        ),
    ] = None,
    draws: Annotated[
        int, _option(metavar="N", min=1, help="semi: subsets drawn for each share.")
    ] = 3,
    finetuning: Annotated[
        str, _option(metavar="NAME", help="finetune: settings of a paper (ifnd, rcl).")
    ] = "ifnd",
    epochs: Annotated[
        int | None,
        _option_without_default(
            metavar="N",
            min=1,
            help=(
                "finetune: number of epochs. [dim]Default: that of the paper, more with few"
                " labels.[/]"
            ),
        ),
    ] = None,
    metric: Annotated[
        str | None,
        _option_without_default(
            metavar="NAME",
            help=(
                "transfer: top1, mean-per-class or map. [dim]Default: from the name of the data.[/]"
            ),
        ),
    ] = None,
    num_clusters: Annotated[
        int | None,
        _option_without_default(
            metavar="N",
            min=1,
            help="clusters: number of clusters. [dim]Default: the number of classes.[/]",
        ),
    ] = None,
    normaliser: Annotated[
        str,
        _option(
            metavar="NAME",
            help=(
                "clusters: normaliser of NMI (arithmetic or geometric mean of the entropies, min,"
                " max)."
            ),
        ),
    ] = "arithmetic",
    alpha: Annotated[
        float | None,
        _option_without_default(
            metavar="A",
            help=(
                "kin: share of pairs above the exact quantile. [dim]Default: that of the method, or"
                " 0.01.[/]"
            ),
        ),
    ] = None,
    classes: Annotated[
        Path | None,
        _option_without_default(
            metavar="FILE",
            help="zero-shot: class names, one per line. [dim]Default: those of the data.[/]",
        ),
    ] = None,
    templates: Annotated[
        Path | None,
        _option_without_default(
            metavar="FILE", help="zero-shot: sentences with {} for the class name, one per line."
        ),
    ] = None,
    like: Annotated[
        Path | None,
        _weights_option(
            metavar="RUN", help="Take data, image size and normalisation from this run."
        ),
    ] = None,
    name: Annotated[
        str | None,
        _weights_option(help="Name in `kinfolk compare`. [dim]Default: the name of the file.[/]"),
    ] = None,
    out: Annotated[
        Path | None,
        _weights_option(
            "--out", "-o", help="Folder to write. [dim]Default: NAME-eval next to it.[/]"
        ),
    ] = None,
    model: Annotated[
        str | None,
        _weights_option(
            metavar="NAME", help="Network that is no ResNet: timm/NAME, torchvision/NAME."
        ),
    ] = None,
    image_size: Annotated[
        int | None,
        _weights_option(
            metavar="N", min=1, help="Side of the images. [dim]Default: their own, up to 224.[/]"
        ),
    ] = None,
    train_seed: Annotated[
        int | None,
        _weights_option(
            metavar="N", help="Seed of the training, which `kinfolk compare` pairs by."
        ),
    ] = None,
    workers: Workers = None,
    debug: Debug = False,
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

    A file of weights from elsewhere is evaluated like a run, in a folder next to it, for `kinfolk
    compare`. It takes the protocols of labels.
    """
    wanted = _protocol_names(protocol)
    shares = None if percent is None else _shares(percent)
    _check_name("probe", probe, PROBES)
    _check_name("fine-tuning", finetuning, FINETUNINGS)
    _check_name("normaliser", normaliser, NORMALISERS)
    lists = subset or []
    for path in lists:
        if not path.is_file():
            raise UsageError(
                f"there is no list {path}; --subset takes a text file with one file name per line"
            )
    if len({path.stem for path in lists}) < len(lists):
        raise UsageError(
            f"--subset has two files called {lists[0].stem!r}; results are stored by that name, so"
            " rename one of them"
        )
    if metric is not None:
        _check_name("metric", metric, METRIC_NAMES)
    if alpha is not None and not 0 < alpha < 1:
        raise UsageError(f"--alpha (={alpha:g}) must be in (0, 1)")
    from kinfolk.cli.options import print_refused
    from kinfolk.cli.run_protocols import Choices, ProtocolRunner
    from kinfolk.evaluation.protocols import write_result
    from kinfolk.evaluation.retrieval import TEMPLATES, read_lines
    from kinfolk.training.load_run import open_run

    about: Any = {
        "like": like,
        "name": name,
        "model": model,
        "image_size": image_size,
        "seed": train_seed,
    }
    if run.is_file():
        if run.suffix.lower() not in WEIGHTS:
            raise UsageError(
                f"{run} is neither a run folder nor a file of weights ({', '.join(WEIGHTS)})"
            )
        others = [each for each in wanted if each not in LABEL_PROTOCOLS]
        if others:
            raise UsageError(
                f"--protocol {others[0]} needs a run of kinfolk, and {run} is a file of weights;"
                " leave it out"
            )
        run = _import_weights(run, out, data if like is None else None, labels_from_folders, about)
        data = None if like is None else data
    elif given := [key for key, value in {**about, "out": out}.items() if value is not None]:
        option = {"seed": "train-seed", "image_size": "image-size"}.get(given[0], given[0])
        raise UsageError(
            f"--{option} is for a file of weights, and {run} is not a file; leave it out"
        )
    opened = open_run(run)
    opened.encoder()  # fails before any image is read if the run has no model
    towers = opened.towers() if any(name in CAPTION_PROTOCOLS for name in wanted) else None
    names, sentences = (
        None if classes is None else read_lines(classes),
        TEMPLATES if templates is None else read_lines(templates),
    )
    images = opened.data(
        data,
        progress=True,
        labels_from_folders=labels_from_folders,
        hierarchy=hierarchy,
        depth=depth,
        workers=workers,
    )
    print_refused(images)
    common = (
        seed,
        k,
        temperature,
        probe,
        shares,
        draws,
        epochs,
        metric,
        num_clusters,
        alpha,
        label_sets,
        names,
        sentences,
    )
    chosen: Any = {
        "normaliser": normaliser,
        "subsets": lists,
        "finetuning": finetuning,
        "unpooled": unpooled,
        "own_mean": own_mean,
    }
    choices = Choices(*common, **chosen)
    run_protocol = ProtocolRunner(
        opened, images, data or opened.config.data.source, choices, towers
    )
    results = {}
    try:
        for name in wanted:
            results[name] = run_protocol(name)
            if images.classes is not None and depth is not None:
                results[name] |= {"depth": depth, "classes": len(images.classes)}
            write_result(run, name, results[name])
    finally:  # shows finished results even if the next protocol fails
        if results:
            show_results(results)


def _import_weights(
    file: Path, out: Path | None, data: str | None, labels_from_folders: bool, about: dict[str, Any]
) -> Path:
    """Writes the folder that a file of weights is evaluated in, and shows what was found in the
    file."""
    from kinfolk.cli.options import screen
    from kinfolk.errors import printable
    from kinfolk.training.foreign_weights import import_weights

    seed = about.pop("seed") or 0
    folder, network = import_weights(
        file,
        out,
        data=data,
        labels_from_folders=labels_from_folders,
        seed=seed,
        progress=True,
        **about,
    )
    screen().print(printable(f"{file}: {network.describe()}; results in {folder}"), markup=False)
    return folder


def _protocol_names(protocol: str) -> list[str]:
    names = [name.strip().lower() for name in protocol.split(",") if name.strip()]
    for name in names:
        _check_name("protocol", name, PROTOCOLS)
    if not names:
        raise UsageError(f"--protocol is empty (there are: {', '.join(PROTOCOLS)})")
    return list(dict.fromkeys(names))


def _check_name(what: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise UsageError(
            f"unknown {what} {name!r}{did_you_mean(name, known, limit=1)} (there are:"
            f" {', '.join(known)})"
        )


def _shares(percent: str) -> list[float]:
    try:
        shares = [float(text) / 100 for text in percent.split(",") if text.strip()]
    except ValueError:
        shares = []
    if not shares or not all(0 < share <= 1 for share in shares):
        raise UsageError(
            f"--percent (={percent}) must be numbers above 0 and at most 100, separated by commas,"
            " such as 100,10,1"
        )
    return shares


METRIC_TITLES = {"top1": "top-1", "mean-per-class": "mean per class", "map": "mAP"}


def show_results(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints one line per protocol, and one per share of the labels, data set or rule within it."""
    from rich.text import Text

    from kinfolk.cli.options import plain_table, screen
    from kinfolk.errors import printable

    table = plain_table("protocol", "result", "measured on", right=("result",))
    for name, result in results.items():
        for number, (part, value, where) in enumerate(lines(result)):
            table.add_row(
                Text(printable(f"{name}{part}") if number == 0 or part else ""),
                Text(value, "bold"),
                Text(printable(where)),
            )
    screen().print(table, soft_wrap=False)


def lines(result: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yields the part of the protocol, the result, and the data it was measured on."""
    where = str(result["measured_on"])
    if "fractions" in result:
        for row in result["fractions"]:
            listed = (
                f" of {row['listed']:,} listed"
                if row.get("listed", row["labels"]) != row["labels"]
                else ""
            )
            name = row.get("subset") or f"{100 * row['fraction']:g} %"
            yield f" {name}", _accuracy(row), f"{row['labels']:,}{listed} labels, {where}"
        if len(result["fractions"]) > 1:
            yield " average", _accuracy(result), f"mean of the {len(result['fractions'])} above"
    elif "sets" in result:
        for row in result["sets"]:
            yield (
                f" {row['name']}",
                f"{METRIC_TITLES[row['metric']]} {percent(row['accuracy'])}",
                str(row["measured_on"]),
            )
        if len(result["sets"]) > 1:
            yield (
                " average",
                percent(result["accuracy"]),
                f"mean of the {len(result['sets'])} above",
            )
    elif "exact" in result:
        yield from _detection_lines(result, where)
    elif any(name in result for name in DIRECTIONS):
        yield from _retrieval_lines(result, where)
    elif "spearman" in result:
        yield "", f"Spearman {100 * result['spearman']:.1f}", where
    elif "nmi" in result:
        yield (
            "",
            f"NMI {percent(result['nmi'], result['deviation'])}",
            f"{where}, {result.get('normaliser', 'arithmetic')} normaliser",
        )
    else:
        yield "", _accuracy(result), where


DIRECTIONS = {
    "image_to_text": ("i→t", "image and caption"),
    "text_to_image": ("t→i", "image and caption"),
    "anchor_to_positive": ("a→p", "anchor and positive"),
    "positive_to_anchor": ("p→a", "anchor and positive"),
}
"""Short names of the directions of a result, and the two sides."""


def _retrieval_lines(result: Mapping[str, Any], where: str) -> Iterator[tuple[str, str, str]]:
    """Recall@1 of both directions and, of text pairs, mAP and nDCG@10."""
    present = {short: result[name] for name, (short, _) in DIRECTIONS.items() if name in result}
    for figure in ("R@1", "mAP", "nDCG@10"):
        if all(figure in found for found in present.values()):
            shares = (f"{short} {percent(found[figure])}" for short, found in present.items())
            yield "", f"{figure} {', '.join(shares)}", where
    if "label_map" in result:
        by = f"mAP {percent(result['label_map'])}, nDCG@10 {percent(result['label_ndcg'])}"
        yield " by label", by, where


def _accuracy(row: Mapping[str, Any]) -> str:
    """The accuracy with its deviation, and top-5 accuracy if it was measured."""
    five = f", top-5 {percent(row['top5'])}" if row.get("top5") is not None else ""
    return percent(row["accuracy"], row.get("deviation")) + five


def _detection_lines(result: Mapping[str, Any], where: str) -> Iterator[tuple[str, str, str]]:
    """Quality of the method's detection and of the exact quantile, then thresholds and
    similarities."""
    parts = [(" flagged", result), (f" exact, α = {result['alpha']:g}", result["exact"])]
    parts += [(f" {name.replace('_', ' ')}", result[name]) for name in DIRECTIONS if name in result]
    for title, row in parts:
        if "f1" in row:
            yield title, _detection(row), where
            yield " per anchor", _detection(row, "anchor_"), "mean over anchors"
            yield (
                "",
                (
                    f"MTPR {percent(row['mtpr'])}, MTNR {percent(row['mtnr'])}, flagged"
                    f" {percent(row['flagged'])}"
                ),
                "",
            )
    if "threshold" in result:
        yield (
            " thresholds",
            f"MAE {result['threshold']['mae']:.3f}, RMSE {result['threshold']['rmse']:.3f}",
            "exact quantile",
        )
    own, alike = (
        "—" if value != value else f"{value:.3f}"
        for value in (result["tp_similarity"], result["fn_similarity"])
    )
    yield (
        " similarity",
        f"TP {own}, FN {alike}",
        next(
            (words for name, (_, words) in DIRECTIONS.items() if name in result), "two views each"
        ),
    )


def _detection(row: Mapping[str, Any], prefix: str = "") -> str:
    """Precision, recall and F1 over pairs, or per anchor with the prefix "anchor_". Missing values
    are shown as —."""
    shares = [row.get(prefix + name) for name in ("precision", "recall", "f1")]
    texts = ["—" if share is None or share != share else f"{100 * share:.1f}" for share in shares]
    return f"precision {texts[0]}, recall {texts[1]}, F1 {texts[2]} %"


def percent(share: float, deviation: float | None = None) -> str:
    """A share in percent, with its deviation if there is one. NaN is shown as —."""
    if share != share:
        return "—"
    known = deviation is not None and deviation == deviation
    return (
        f"{100 * share:.1f} ± {100 * deviation:.1f} %"
        if known and deviation is not None
        else f"{100 * share:.1f} %"
    )
