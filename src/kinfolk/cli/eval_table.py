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
