"""`kinfolk cnce`: measures NCE and CNCE as estimators of mutual information."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from kinfolk.cli.options import (
    examples,
    flag,
    option,
    overwrite_option,
    plain_table,
    require_new,
    screen,
)
from kinfolk.errors import UsageError

EPILOG = examples(
    "kinfolk cnce",
    "kinfolk cnce --train-each --out table5.json",
    "kinfolk cnce --study variance --views first.npy second.npy",
)


def cnce(
    study: Annotated[
        Literal["table", "variance"],
        option(
            "table: estimates for each ω (Table 5). variance: for each number of negatives.",
            *("--study", "-s"),
        ),
    ] = "table",
    seeds: Annotated[
        int, option("Number of runs. Mean and deviation are over the runs.", min=1)
    ] = 5,
    epochs: Annotated[int, option("Epochs of each critic.", min=1)] = 100,
    train_each: Annotated[
        bool,
        flag(
            "--train-each",
            "table: also train a critic for each ω with its own CNCE (slower).",
            None,
        ),
    ] = False,
    views: Annotated[
        tuple[Path, Path] | None,
        option(
            "variance: embeddings of two views, with matching rows, instead of the toy data.",
            metavar="A.npy B.npy",
        ),
    ] = None,
    temperature: Annotated[float, option("Temperature of the critic.")] = 0.07,
    out: Annotated[Path | None, option("JSON file for all results.", "--out", "-o")] = None,
    overwrite: Annotated[bool, overwrite_option("the file")] = False,
) -> None:
    """Measure NCE and CNCE, two lower bounds on mutual information, where the true value is known.

    The data are two correlated Gaussian variables, as in appendix B of Wu et al., ICLR 2021. The
    table also shows the paper's results. CNCE draws its negatives above the percentile ω of the
    anchor's scores.
    """
    if study == "variance" and train_each:
        raise UsageError("--train-each belongs to --study table")
    if study == "table" and views is not None:
        raise UsageError("--views belongs to --study variance")
    if not temperature > 0:
        raise UsageError(f"--temperature (={temperature}) must be above 0")
    if out is not None:
        if out.suffix != ".json":
            raise UsageError(f"--out (={out}) must end in .json")
        require_new(out, overwrite)
    from kinfolk.cnce import Toy, table_study, variance_study, views_study

    toy = Toy(epochs=epochs, temperature=temperature)
    if study == "table":
        found = table_study(seeds, toy, train_each=train_each, progress=True)
    elif views is None:
        found = variance_study(seeds, toy, progress=True)
    else:
        found = views_study(*views, temperature)
    (_show_table if study == "table" else _show_variance)(found)
    if out is not None:
        import json

        from kinfolk.files import write_text

        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, json.dumps(found, indent=2) + "\n")


def _show_table(found: dict[str, Any]) -> None:
    rows = {(row["critic"], row["points"], row["omega"]): row for row in found["rows"]}
    settings, premise = found["settings"], found["premise"]
    titles = {"nce": "One critic for all rows, trained by NCE"}
    if settings["train_each"]:
        titles["own"] = "A critic for each row, trained by the estimator of that row"
    _print(_truth(found["true"]))
    for critic, title in titles.items():
        heads = ("ω", "paper", "training points", "fresh points", "premise")
        table = plain_table(*heads, right=heads, title=title)
        for omega, paper in found["paper"].items():
            ours = [rows[critic, points, int(omega)] for points in ("train", "fresh")]
            holds = f"{100 * premise[omega]:.0f} %" if critic == "nce" and omega != "0" else "–"
            cells = [_mean_and_deviation(row) for row in (paper, *ours)]
            table.add_row("NCE" if omega == "0" else omega, *cells, holds)
        _print(table)
    runs = settings["seeds"]
    spread = f"Mean ± standard deviation over {runs} runs" if runs > 1 else "One run"
    _print(
        f"{spread}: {settings['num_points']:,} points, {settings['num_negatives']} negatives,"
        f" epochs: {settings['epochs']}. CNCE draws negatives above the percentile ω. Premise:"
        " share of fresh anchors whose negatives all have e^f above its mean, as theorem 3.1"
        " requires.",
        style="dim",
    )


def _show_variance(found: dict[str, Any]) -> None:
    rows = {(row["negatives"], row["omega"]): row for row in found["rows"]}
    numbers, omegas = (list(dict.fromkeys(key[part] for key in rows)) for part in (0, 1))
    heads = ["k"]
    for omega in omegas:
        heads += [f"ω = {omega}" if omega else "NCE", "variance"]
    table = plain_table(*heads, right=tuple(heads))
    for number in numbers:
        ours = [rows[number, omega] for omega in omegas]
        cells = [text for row in ours for text in (f"{row['mean']:.4f}", f"{row['variance']:.1e}")]
        table.add_row(f"{number:,}", *cells)
    if found["true"] is not None:
        _print(_truth(found["true"]))
    _print(table)
    settings = found["settings"]
    critics = f", critics: {settings['seeds']}" if "seeds" in settings else ""
    _print(
        f"k: number of negatives. Variance over {settings['draws']} draws of the negatives, with"
        f" anchor and positive fixed, averaged over anchors: {settings['anchors']}{critics}.",
        style="dim",
    )


def _truth(information: float) -> str:
    return f"True mutual information: [bold]{information:.5f}[/] nats"


def _print(what: Any, style: str | None = None) -> None:
    screen().print(what, style=style, soft_wrap=False)


def _mean_and_deviation(row: dict[str, Any]) -> str:
    digits = ".5f" if abs(row["mean"]) >= 1e-3 else ".1e"
    values = (row["mean"], row["stdev"])
    return " ± ".join(format(value, digits) for value in values if value is not None)
