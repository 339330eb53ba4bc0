"""The table that `kinfolk eval` shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

METRICS = {"top1": "top-1", "mean-per-class": "mean per class", "map": "mAP"}


def show_results(results: Mapping[str, Mapping[str, Any]]) -> None:
    """One line for each protocol, and for each share of the labels, data set or rule it has."""
    from rich.text import Text

    from kinfolk.cli.console import plain_table, screen
    from kinfolk.foreign import printable

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
            yield f" {100 * row['fraction']:g} %", percent(row["accuracy"], row.get("deviation")), f"{row['labels']:,} labels, {where}"
    elif "sets" in result:
        for row in result["sets"]:
            yield f" {row['name']}", f"{METRICS[row['metric']]} {percent(row['accuracy'])}", str(row["measured_on"])
    elif "exact" in result:
        yield from _kin(result, where)
    elif "image_to_text" in result:
        shares = [result[name]["R@1"] for name in ("image_to_text", "text_to_image")]
        yield "", "R@1 " + ", ".join(f"{name} {percent(share)}" for name, share in zip(("i→t", "t→i"), shares, strict=True)), where
    elif "nmi" in result:
        yield "", f"NMI {percent(result['nmi'], result['deviation'])}", where
    else:
        yield "", percent(result["accuracy"]), where


def _kin(result: Mapping[str, Any], where: str) -> Iterator[tuple[str, str, str]]:
    """The method's own flags, those of the exact quantile, thresholds and similarities."""
    for title, row in ((" flagged", result), (f" exact, α = {result['alpha']:g}", result["exact"])):
        if "f1" in row:
            pairs = f"precision {percent(row['precision'])}, recall {percent(row['recall'])}, F1 {percent(row['f1'])}"
            yield title, pairs, where
            yield "", f"MTPR {percent(row['mtpr'])}, MTNR {percent(row['mtnr'])}, {percent(row['flagged'])} of the pairs", ""
    if "threshold" in result:
        yield " thresholds", f"MAE {result['threshold']['mae']:.3f}, RMSE {result['threshold']['rmse']:.3f}", "against the exact quantile"
    own, alike = ("—" if value != value else f"{value:.3f}" for value in (result["tp_similarity"], result["fn_similarity"]))
    yield " similarity", f"TP {own}, FN {alike}", "two views of each sample"


def percent(share: float, deviation: float | None = None) -> str:
    """A share in percent, with its deviation where it has one; — where there is none."""
    if share != share:
        return "—"
    known = deviation is not None and deviation == deviation
    return f"{100 * share:.1f} ± {100 * deviation:.1f} %" if known and deviation is not None else f"{100 * share:.1f} %"
