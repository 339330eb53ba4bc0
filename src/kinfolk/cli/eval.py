"""`kinfolk eval`: measures what the encoder has learnt, with labels it never saw."""

from __future__ import annotations

from typing import Annotated

import typer

from kinfolk.cli.options import Debug, LabelsFromFolders, RunFolder, RunsData, Workers, examples
from kinfolk.errors import UsageError

PROTOCOLS = ("knn", "linear")
EPILOG = examples(
    "kinfolk eval runs/digits",
    "kinfolk eval runs/photos --data labelled/ --labels-from-folders --protocol knn,linear",
)


def evaluate(
    run: RunFolder,
    data: RunsData = None,
    labels_from_folders: LabelsFromFolders = False,
    protocol: Annotated[str, typer.Option("--protocol", "-p", help="knn, linear, or both with a comma.")] = "knn,linear",
    k: Annotated[int, typer.Option("--k", metavar="N", min=1, help="Neighbours of knn.")] = 20,
    temperature: Annotated[float, typer.Option(help="Temperature of the neighbours' votes.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of what is held out.")] = 0,
    workers: Workers = None,
    debug: Debug = False,
) -> None:
    """Measure the encoder with labels: nearest neighbours and a linear probe.

    Results go to RUN/eval/. Without a test split, knn leaves one out and linear tests on a fifth of the samples.
    """
    wanted = _wanted(protocol)
    from kinfolk.cli.console import tell_refused
    from kinfolk.evaluation.protocols import run_knn, run_linear, take_parts
    from kinfolk.evaluation.results import write_result
    from kinfolk.training.opened import open_run

    opened = open_run(run)
    opened.encoder()  # a run without a model is refused before any picture is read
    images = opened.data(data, progress=True, labels_from_folders=labels_from_folders, workers=workers)
    tell_refused(images)
    parts = take_parts(images, opened.features(images, progress=True))
    results = {}
    try:
        for name in wanted:
            result = run_knn(parts, k, temperature) if name == "knn" else run_linear(parts, seed)
            results[name] = {**result, "data": data or opened.config.data.source}
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

    table = plain_table("protocol", "accuracy", "measured on", right=("accuracy",))
    for name, result in results.items():
        table.add_row(Text(name), Text(f"{100 * float(str(result['accuracy'])):.1f} %", "bold"), Text(str(result["measured_on"])))
    screen().print(table, soft_wrap=False)
