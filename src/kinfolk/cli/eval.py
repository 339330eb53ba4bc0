"""The table that `kinfolk eval` shows.

`kinfolk eval`: measures what the encoder has learnt, with labels it never saw.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kinfolk.cli.options import DATA, FLAG, Debug, LabelsFromFolders, RunFolder, RunsData, Workers, examples
from kinfolk.errors import UsageError

METRICS = {"top1": "top-1", "mean-per-class": "mean per class", "map": "mAP"}


def show_results(results: Mapping[str, Mapping[str, Any]]) -> None:
    """One line for each protocol, and for each share of the labels, data set or rule it has."""
    from rich.text import Text

    from kinfolk.cli.options import plain_table, screen
    from kinfolk.errors import printable

    table = plain_table("protocol", "result", "measured on", right=("result",))
    for name, result in results.items():
        for number, (part, figure, where) in enumerate(lines(result)):
            table.add_row(Text(printable(f"{name}{part}") if number == 0 or part else ""), Text(figure, "bold"), Text(printable(where)))
    screen().print(table, soft_wrap=False)


def lines(result: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Part of the protocol, figure, and what it was measured on."""
    where = str(result["measured_on"])
    if "fractions" in result:
        for row in result["fractions"]:
            listed = f" of {row['listed']:,} listed" if row.get("listed", row["labels"]) != row["labels"] else ""
            name = row.get("subset") or f"{100 * row['fraction']:g} %"
            yield f" {name}", _accuracy(row), f"{row['labels']:,}{listed} labels, {where}"
        if len(result["fractions"]) > 1:
            yield " average", _accuracy(result), f"mean of the {len(result['fractions'])} above"
    elif "sets" in result:
        for row in result["sets"]:
            yield f" {row['name']}", f"{METRICS[row['metric']]} {percent(row['accuracy'])}", str(row["measured_on"])
        if len(result["sets"]) > 1:
            yield " average", percent(result["accuracy"]), f"mean of the {len(result['sets'])} above"
    elif "exact" in result:
        yield from _kin(result, where)
    elif "image_to_text" in result:
        shares = [result[name]["R@1"] for name in ("image_to_text", "text_to_image")]
        yield "", "R@1 " + ", ".join(f"{name} {percent(share)}" for name, share in zip(("i→t", "t→i"), shares, strict=True)), where
    elif "nmi" in result:
        yield "", f"NMI {percent(result['nmi'], result['deviation'])}", f"{where}, {result.get('normaliser', 'arithmetic')} normaliser"
    else:
        yield "", _accuracy(result), where


def _accuracy(row: Mapping[str, Any]) -> str:
    """The accuracy with its deviation, and top-5 where it was measured."""
    five = f", top-5 {percent(row['top5'])}" if row.get("top5") is not None else ""
    return percent(row["accuracy"], row.get("deviation")) + five


def _kin(result: Mapping[str, Any], where: str) -> Iterator[tuple[str, str, str]]:
    """The method's own flags, those of the exact quantile, thresholds and similarities."""
    for title, row in ((" flagged", result), (f" exact, α = {result['alpha']:g}", result["exact"])):
        if "f1" in row:
            yield title, _detection(row), where
            yield " per anchor", _detection(row, "anchor_"), "mean of anchors"
            yield "", f"MTPR {percent(row['mtpr'])}, MTNR {percent(row['mtnr'])}, flagged {percent(row['flagged'])}", ""
    if "threshold" in result:
        yield " thresholds", f"MAE {result['threshold']['mae']:.3f}, RMSE {result['threshold']['rmse']:.3f}", "exact quantile"
    own, alike = ("—" if value != value else f"{value:.3f}" for value in (result["tp_similarity"], result["fn_similarity"]))
    yield " similarity", f"TP {own}, FN {alike}", "two views each"


def _detection(row: Mapping[str, Any], prefix: str = "") -> str:
    """Precision, recall and F1, over pairs or, with "anchor_", per anchor; — where there is none."""
    shares = [row.get(prefix + name) for name in ("precision", "recall", "f1")]
    texts = ["—" if share is None or share != share else f"{100 * share:.1f}" for share in shares]
    return f"precision {texts[0]}, recall {texts[1]}, F1 {texts[2]} %"


def percent(share: float, deviation: float | None = None) -> str:
    """A share in percent, with its deviation where it has one; — where there is none."""
    if share != share:
        return "—"
    known = deviation is not None and deviation == deviation
    return f"{100 * share:.1f} ± {100 * deviation:.1f} %" if known and deviation is not None else f"{100 * share:.1f} %"


OF_LABELS = ("knn", "linear", "semi", "finetune", "transfer", "clusters")
OF_CAPTIONS = ("retrieval", "zero-shot")
PROTOCOLS = (*OF_LABELS, "kin", *OF_CAPTIONS)
PROBES = ("lbfgs", "glofnd", "ifnd", "ring", "rcl")
FINETUNINGS = ("ifnd", "rcl")
NORMALISERS = ("arithmetic", "geometric", "min", "max")
METRIC_NAMES = ("top1", "mean-per-class", "map")
_of_data = partial(typer.Option, rich_help_panel=DATA, show_default=False)
_usual = partial(typer.Option, rich_help_panel="Settings of the protocols")
_own = partial(_usual, show_default=False)
EPILOG = examples(
    "kinfolk eval runs/digits",
    "kinfolk eval runs/photos --data labelled/ --labels-from-folders --protocol knn,linear,semi",
    "kinfolk eval runs/photos --protocol finetune --percent 10",
    "kinfolk eval runs/imagenet --protocol finetune --subset 1percent.txt --subset 10percent.txt --finetuning rcl",
    "kinfolk eval runs/photos --data pets/ --labels-from-folders --protocol transfer",
    "kinfolk eval runs/cifar100 --hierarchy cifar100 --depth 1 --protocol linear,clusters",
    "kinfolk eval runs/captions --data test.csv --protocol retrieval",
)


def evaluate(
    run: RunFolder,
    data: RunsData = None,
    labels_from_folders: LabelsFromFolders = False,
    hierarchy: Annotated[str | None, _of_data(help="Table of child and parent classes, or cifar100. [dim]Default: the run's.[/]")] = None,
    depth: Annotated[int | None, _of_data(metavar="N", min=0, help="Take labels at this depth of the hierarchy; 0: the root.")] = None,
    label_sets: Annotated[Path | None, _of_data(metavar="FILE", help="Table for transfer, a row for each label: image, label.")] = None,
    protocol: Annotated[
        str, typer.Option("--protocol", "-p", metavar="NAMES", help=f"{', '.join(PROTOCOLS)}: one, or several with commas.")
    ] = "knn,linear",
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of what is held out, drawn or augmented.")] = 0,
    k: Annotated[int, _usual("--k", metavar="N", min=1, help="Neighbours of knn.")] = 20,
    temperature: Annotated[float, _usual(metavar="T", help="Of the neighbours' votes in knn.")] = 0.1,
    probe: Annotated[
        str, _usual(metavar="NAME", help="Of linear and semi: lbfgs, or as the papers have it: glofnd, ifnd, ring, rcl.")
    ] = "lbfgs",
    unpooled: Annotated[
        bool, _usual("--unpooled", metavar=FLAG, help="Take features before the average pooling, as Ring's tables.")
    ] = False,
    own_mean: Annotated[
        bool, _usual("--own-mean", metavar=FLAG, help="Normalise images by the data's own mean and deviation, as Ring's transfer.")
    ] = False,
    percent: Annotated[
        str | None, _own(metavar="LIST", help="Shares of the labels. [dim]Default: 100,10,1,0.1 for semi, 10,1 for finetune.[/]")
    ] = None,
    subset: Annotated[
        list[Path] | None,
        _own(metavar="FILE", help="Labels of semi and finetune by a list of file names, such as SimCLR's 1percent.txt; may be repeated."),
    ] = None,
    draws: Annotated[int, _usual(metavar="N", min=1, help="Subsets of each share in semi.")] = 3,
    finetuning: Annotated[str, _usual(metavar="NAME", help="Settings of finetune, as the papers have them: ifnd, rcl.")] = "ifnd",
    epochs: Annotated[int | None, _own(metavar="N", min=1, help="Of finetune. [dim]Default: the paper's, more on few labels.[/]")] = None,
    metric: Annotated[
        str | None, _own(metavar="NAME", help="Of transfer: top1, mean-per-class or map. [dim]Default: by the data's name.[/]")
    ] = None,
    num_clusters: Annotated[int | None, _own(metavar="N", min=1, help="Of clusters. [dim]Default: as many as classes.[/]")] = None,
    normaliser: Annotated[
        str, _usual(metavar="NAME", help="What clusters divides NMI by: arithmetic or geometric mean of the entropies, min or max.")
    ] = "arithmetic",
    alpha: Annotated[
        float | None, _own(metavar="A", help="Share of pairs above kin's exact quantile. [dim]Default: the method's, or 0.01.[/]")
    ] = None,
    classes: Annotated[Path | None, _own(metavar="FILE", help="Names of zero-shot, one a line. [dim]Default: the data's.[/]")] = None,
    templates: Annotated[Path | None, _own(metavar="FILE", help="Sentences of zero-shot, one a line, {} for the name.")] = None,
    workers: Workers = None,
    debug: Debug = False,
) -> None:
    """Measure what a run has learnt, as the papers do. Results go to RUN/eval/ and into the report.

    [bold]knn[/]        weighted nearest neighbours
    [bold]linear[/]     linear probe on frozen features
    [bold]semi[/]       linear probes on 100, 10, 1 and 0.1 % of the labels
    [bold]finetune[/]   the whole encoder trained on 10 and 1 % of the labels
    [bold]transfer[/]   logistic regression on another data set
    [bold]clusters[/]   k-means against the labels
    [bold]kin[/]        the false negatives that the method flags
    [bold]retrieval[/], [bold]zero-shot[/]: of runs that learnt from captions

    Classifiers fit on the training split and are tested on the test split.
    Without one, knn leaves one out and the others test on a fifth of each class.
    The run's own weights never change.
    """
    wanted = _listed(protocol)
    shares = None if percent is None else _shares(percent)
    _known("probe", probe, PROBES)
    _known("fine-tuning", finetuning, FINETUNINGS)
    _known("normaliser", normaliser, NORMALISERS)
    lists = subset or []
    for path in lists:
        if not path.is_file():
            raise UsageError(f"there is no list {path}; --subset takes a text file with one file name a line")
    if len({path.stem for path in lists}) < len(lists):
        raise UsageError(f"--subset names two files called {lists[0].stem!r}; results go by that name, so give each another")
    if metric is not None:
        _known("metric", metric, METRIC_NAMES)
    if alpha is not None and not 0 < alpha < 1:
        raise UsageError(f"--alpha (={alpha:g}) must be in (0, 1)")
    from kinfolk.cli.measure import Choices, Measures
    from kinfolk.cli.options import tell_refused
    from kinfolk.evaluation.protocols import write_result
    from kinfolk.evaluation.retrieval import TEMPLATES, read_lines
    from kinfolk.training.load_run import open_run

    opened = open_run(run)
    opened.encoder()  # a run without a model is refused before any image is read
    towers = opened.towers() if any(name in OF_CAPTIONS for name in wanted) else None
    names, sentences = None if classes is None else read_lines(classes), TEMPLATES if templates is None else read_lines(templates)
    images = opened.data(data, progress=True, labels_from_folders=labels_from_folders, hierarchy=hierarchy, depth=depth, workers=workers)
    tell_refused(images)
    usual = (seed, k, temperature, probe, shares, draws, epochs, metric, num_clusters, alpha, label_sets, names, sentences)
    chosen: Any = {"normaliser": normaliser, "subsets": lists, "finetuning": finetuning, "unpooled": unpooled, "own_mean": own_mean}
    choices = Choices(*usual, **chosen)
    measures = Measures(opened, images, data or opened.config.data.source, choices, towers)
    results = {}
    try:
        for name in wanted:
            results[name] = measures(name)
            if images.classes is not None and depth is not None:
                results[name] |= {"depth": depth, "classes": len(images.classes)}
            write_result(run, name, results[name])
    finally:  # what was measured is shown, also where the next protocol can't be
        if results:
            show_results(results)


def _listed(protocol: str) -> list[str]:
    names = [name.strip().lower() for name in protocol.split(",") if name.strip()]
    for name in names:
        _known("protocol", name, PROTOCOLS)
    if not names:
        raise UsageError(f"--protocol names nothing to measure (there are: {', '.join(PROTOCOLS)})")
    return list(dict.fromkeys(names))


def _known(what: str, name: str, known: tuple[str, ...]) -> None:
    import difflib

    if name not in known:
        near = difflib.get_close_matches(name, known, 1, 0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"unknown {what} {name!r}{hint} (there are: {', '.join(known)})")


def _shares(percent: str) -> list[float]:
    try:
        shares = [float(text) / 100 for text in percent.split(",") if text.strip()]
    except ValueError:
        shares = []
    if not shares or not all(0 < share <= 1 for share in shares):
        raise UsageError(f"--percent (={percent}) must be numbers above 0 and at most 100, separated by commas, such as 100,10,1")
    return shares
