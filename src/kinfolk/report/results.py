"""The figures of results, named alike in `kinfolk eval`, the report and comparisons."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

DIRECTIONS = {
    "image_to_text": "i→t",
    "text_to_image": "t→i",
    "anchor_to_positive": "a→p",
    "positive_to_anchor": "p→a",
}
MAIN = {"accuracy": "", "nmi": "NMI", "mean": "mean recall", "spearman": "Spearman"}
"""A main figure is named after the protocol alone, others as in `kin F1`."""
DETECTION_NAMES = {
    "precision": "precision",
    "recall": "recall",
    "f1": "F1",
    "anchor_precision": "precision per anchor",
    "anchor_recall": "recall per anchor",
    "anchor_f1": "F1 per anchor",
}
CLUSTERS = {"mtpr": "MTPR", "mtnr": "MTNR"}
SIMILARITIES = {"tp_similarity": "TP similarity", "fn_similarity": "FN similarity"}
SHARES = {
    "top5": "top 5",
    "label_map": "mAP by label",
    "label_ndcg": "nDCG@10 by label",
    **DETECTION_NAMES,
    **CLUSTERS,
    **SIMILARITIES,
}
DISTANCES = {"mae": "MAE", "rmse": "RMSE"}
"""Errors of thresholds; lower is better."""
METRICS = {"top1": "top-1", "mean-per-class": "mean per class", "map": "mAP"}


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_distance(figure: str) -> bool:
    """Whether lower values are better."""
    return figure.rpartition(" ")[2] in DISTANCES.values()


def figures_of_result(protocol: str, result: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a protocol, shares in percent: the main figure under the protocol's name,
    others under both names; for a protocol with parts, those of each part.

    Example:
        >>> shares = [{"fraction": 1, "accuracy": 0.75}, {"fraction": 0.5, "accuracy": 0.5}]
        >>> figures_of_result("semi", {"accuracy": 0.625, "fractions": shares})
        {'semi 100 %': 75.0, 'semi 50 %': 50.0}
        >>> figures_of_result("kin", {"f1": 0.25, "threshold": {"mae": 0.02}})
        {'kin F1': 25.0, 'kin threshold MAE': 0.02}
    """
    parts = parts_of(protocol, result)
    if not parts:
        return dict(_walk(protocol, result))
    return {
        name if key in MAIN else f"{name} {SHARES[key]}": 100 * float(value)
        for name, part in parts.items()
        for key, value in part.items()
        if (key in MAIN or key == "top5") and is_number(value)
    }


def parts_of(protocol: str, result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """By name: shares of the labels (`semi 10 %`, or `semi 10percent` by a list), or data sets
    (`transfer cifar100`)."""
    parts = {}
    for kind in ("fractions", "sets"):
        listed = result.get(kind)
        for part in listed if isinstance(listed, list) else ():
            if isinstance(part, Mapping) and ("name" in part or is_number(part.get("fraction"))):
                name = part.get("name") or part.get("subset") or f"{100 * part['fraction']:g} %"
                parts[f"{protocol} {name}"] = part
    return parts


def _walk(name: str, result: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in result.items():
        if isinstance(value, Mapping):
            # recalls, not the detection of a direction
            if key in DIRECTIONS and all(map(is_number, value.values())):
                for rank, share in value.items():
                    yield f"{DIRECTIONS[key]} {rank}", 100 * float(share)
            elif key != "exact":  # of another rule than the method's
                yield from _walk(f"{name} {key}", value)
        elif is_number(value):
            if key in MAIN:
                yield name, 100 * float(value)
            elif key in SHARES:
                yield f"{name} {SHARES[key]}", 100 * float(value)
            elif key in DISTANCES:
                yield f"{name} {DISTANCES[key]}", float(value)


def result_rows(results: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Figure, value, and what it was measured on."""
    rows = []
    for name, result in results.items():
        parts, figures = parts_of(name, result), figures_of_result(name, result)
        if len(parts) > 1 and is_number(result.get("accuracy")):
            figures[f"{name} average"] = 100 * result["accuracy"]
        if isinstance(result.get("exact"), Mapping):
            exact = f"{name}, exact α = {result.get('alpha', math.nan):g},"
            figures |= figures_of_result(exact, result["exact"])
        for figure, value in figures.items():
            part = {**result, **parts.get(figure, {})}
            text = f"{value:.3f}" if is_distance(figure) else f"{value:.1f} %"
            if is_number(part.get("deviation")) and figure in (name, *parts):
                text = f"{value:.1f} ± {100 * part['deviation']:.1f} %"
            if not math.isnan(value):
                rows.append((figure, text, _explain(part, figure in (name, *parts))))
    return rows


def _explain(part: Mapping[str, Any], main: bool) -> str:
    words = [text for key, text in MAIN.items() if main and key in part and text]
    words += [METRICS[part["metric"]]] if part.get("metric") in METRICS else []
    words += [f"{part['normaliser']} normaliser"] if "normaliser" in part else []
    if is_number(part.get("labels")):
        words.append(f"{part['labels']:,} labels")
    words += [str(part["measured_on"])] if part.get("measured_on") else []
    return ", ".join(words)
