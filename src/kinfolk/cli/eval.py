"""`kinfolk eval`: measures what the encoder has learnt, with labels it never saw."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kinfolk.cli.options import DATA, Debug, LabelsFromFolders, RunFolder, RunsData, Workers, examples
from kinfolk.errors import UsageError

PROTOCOLS = ("knn", "linear", "clusters", "retrieval", "zero-shot")
OF_LABELS = ("knn", "linear", "clusters")
EPILOG = examples(
    "kinfolk eval runs/digits",
    "kinfolk eval runs/photos --data labelled/ --labels-from-folders --protocol knn,linear",
    "kinfolk eval runs/cifar100 --hierarchy cifar100 --depth 1 --protocol linear,clusters",
    "kinfolk eval runs/captions --data test.csv --protocol retrieval",
)


def evaluate(
    run: RunFolder,
    data: RunsData = None,
    labels_from_folders: LabelsFromFolders = False,
    hierarchy: Annotated[
        str | None,
        typer.Option(
            help="Table of child and parent classes, or cifar100. [dim]Default: the run's.[/]", rich_help_panel=DATA, show_default=False
        ),
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="Take labels at this depth of the hierarchy; 0: the root.", rich_help_panel=DATA, show_default=False
        ),
    ] = None,
    protocol: Annotated[
        str, typer.Option("--protocol", "-p", help="knn, linear, clusters, retrieval, zero-shot, or several with commas.")
    ] = "knn,linear",
    k: Annotated[int, typer.Option("--k", metavar="N", min=1, help="Neighbours of knn.")] = 20,
    temperature: Annotated[float, typer.Option(help="Temperature of the neighbours' votes.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of what is held out.")] = 0,
    num_clusters: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Of clusters. [dim]Default: as many as classes.[/]", show_default=False)
    ] = None,
    classes: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Names of zero-shot, one a line. [dim]Default: the data's.[/]", show_default=False),
    ] = None,
    templates: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Sentences of zero-shot, one a line, {} for the name.", show_default=False)
    ] = None,
    workers: Workers = None,
    debug: Debug = False,
) -> None:
    """Measure the encoder with labels: nearest neighbours, a linear probe, k-means clusters.

    Results go to RUN/eval/. Without a test split, knn leaves one out and linear tests on a fifth of the samples.
    clusters is the normalised mutual information of labels and clusters of the training samples, mean and deviation of five k-means.
    retrieval (recall of captions and pictures) and zero-shot are for runs that learnt from captions.
    """
    wanted = _wanted(protocol)
    from kinfolk.cli.console import tell_refused
    from kinfolk.evaluation.paired import run_retrieval, run_zero_shot
    from kinfolk.evaluation.protocols import run_clusters, run_knn, run_linear, take_parts
    from kinfolk.evaluation.results import write_result
    from kinfolk.evaluation.zero_shot import TEMPLATES, read_lines
    from kinfolk.training.opened import open_run

    opened = open_run(run)
    opened.encoder()  # a run without a model is refused before any picture is read
    towers = opened.towers() if any(name not in OF_LABELS for name in wanted) else None
    names, sentences = None if classes is None else read_lines(classes), TEMPLATES if templates is None else read_lines(templates)
    images = opened.data(data, progress=True, labels_from_folders=labels_from_folders, hierarchy=hierarchy, depth=depth, workers=workers)
    tell_refused(images)
    labelled = any(name in OF_LABELS for name in wanted)
    parts = take_parts(images, opened.features(images, progress=True)) if labelled else None
    results = {}
    try:
        measures = (
            {}
            if parts is None
            else {
                "knn": lambda: run_knn(parts, k, temperature),
                "linear": lambda: run_linear(parts, seed),
                "clusters": lambda: run_clusters(parts, num_clusters),
            }
        )
        if towers is not None:
            measures |= {
                "retrieval": lambda: run_retrieval(towers, images, progress=True),
                "zero-shot": lambda: run_zero_shot(towers, images, classes=names, templates=sentences, progress=True),
            }
        for name in wanted:
            results[name] = {**measures[name](), "data": data or opened.config.data.source}
            if images.classes is not None and depth is not None:
                results[name] |= {"depth": depth, "classes": len(images.classes)}
            write_result(run, name, results[name])
    finally:  # what was measured is shown, also where the next protocol can't be
        if results:
            _show(results)


def _wanted(protocol: str) -> list[str]:
    import difflib

    names = [name.strip().lower() for name in protocol.split(",") if name.strip()]
    for name in names:
        if name not in PROTOCOLS:
            near = difflib.get_close_matches(name, PROTOCOLS, 1, 0.4)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"unknown protocol {name!r}{hint} (there are: {', '.join(PROTOCOLS)})")
    if not names:
        raise UsageError(f"--protocol names nothing to measure (there are: {', '.join(PROTOCOLS)})")
    return list(dict.fromkeys(names))


def _show(results: dict[str, dict[str, object]]) -> None:
    from rich.text import Text

    from kinfolk.cli.console import plain_table, screen

    table = plain_table("protocol", "result", "measured on", right=("result",))
    for name, result in results.items():
        table.add_row(Text(name), Text(_figure(result), "bold"), Text(str(result["measured_on"])))
    screen().print(table, soft_wrap=False)


def _figure(result: dict[str, object]) -> str:
    """An accuracy, a mutual information with its deviation, or the recall of the first in both directions."""
    if "image_to_text" in result:
        shares = [result[name]["R@1"] for name in ("image_to_text", "text_to_image")]  # type: ignore[index]
        return "R@1 " + ", ".join(f"{name} {100 * share:.1f} %" for name, share in zip(("i→t", "t→i"), shares, strict=True))
    if "nmi" not in result:
        return f"{100 * float(str(result['accuracy'])):.1f} %"
    return f"NMI {100 * float(str(result['nmi'])):.1f} ± {100 * float(str(result['deviation'])):.1f} %"
