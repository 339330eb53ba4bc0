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
    print_table,
    require_new,
    say,
    say_wrapped,
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
    settings = found["settings"]
    print_truth(found["true"])
    heads = ("critic", "points", "ω", "paper", "estimate", "premise")
    table = plain_table(*heads, right=heads[2:])
    shown = [row for row in found["rows"] if settings["train_each"] or row["critic"] == "nce"]
    for row in sorted(shown, key=lambda row: row["critic"]):
        omega = str(row["omega"])
        holds = omega != "0" and (row["critic"], row["points"]) == ("nce", "fresh")
        table.add_row(
            {"nce": "shared"}.get(row["critic"], row["critic"]),
            row["points"],
            "NCE" if omega == "0" else omega,
            _mean_and_deviation(found["paper"][omega]),
            _mean_and_deviation(row),
            f"{100 * found['premise'][omega]:.0f} %" if holds else "–",
        )
    screen().print(table, soft_wrap=False)
    runs = settings["seeds"]
    spread = f"Mean ± standard deviation over {runs} runs" if runs > 1 else "One run"
    say_wrapped(
        f"{spread}: {settings['num_points']:,} points, {settings['num_negatives']} negatives,"
        f" epochs: {settings['epochs']}. CNCE draws negatives above the percentile ω. The shared"
        " critic is trained by NCE, others by the estimator of the row. Premise: share of fresh"
        " anchors whose negatives all have e^f above its mean, as theorem 3.1 requires.",
        "dim",
    )


def _show_variance(found: dict[str, Any]) -> None:
    print_truth(found["true"])
    rows = [
        (f"{row['negatives']:,}", str(row["omega"]), f"{row['mean']:.4f}", f"{row['variance']:.1e}")
        for row in found["rows"]
    ]
    heads = ("k", "ω (0: NCE)", "mean", "variance")
    print_table(heads, rows, right=heads)
    settings = found["settings"]
    critics = f", critics: {settings['seeds']}" if "seeds" in settings else ""
    say_wrapped(
        f"k: number of negatives. Variance over {settings['draws']} draws of the negatives, with"
        f" anchor and positive fixed, averaged over anchors: {settings['anchors']}{critics}.",
        "dim",
    )


def print_truth(information: float | None) -> None:
    if information is not None:
        say(f"True mutual information: {information:.5f} nats", "bold")


def _mean_and_deviation(row: dict[str, Any]) -> str:
    digits = ".5f" if abs(row["mean"]) >= 1e-3 else ".1e"
    values = (row["mean"], row["stdev"])
    return " ± ".join(format(value, digits) for value in values if value is not None)
