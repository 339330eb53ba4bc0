"""The figures of one run: what the protocols measured, and what the journal says of its last epoch. Shares are in percent."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kinfolk.report.record import Record

DIRECTIONS = {"image_to_text": "i→t", "text_to_image": "t→i"}
MAIN = {"accuracy", "nmi", "mean"}
"""What a protocol is known by; other figures of it are named after it, as in `kin F1`."""
AVERAGE = "average"
SHARES = {
    "top5": "top 5",
    "precision": "precision",
    "recall": "recall",
    "f1": "F1",
    "anchor_precision": "precision per anchor",
    "anchor_recall": "recall per anchor",
    "anchor_f1": "F1 per anchor",
    "mtpr": "MTPR",
    "mtnr": "MTNR",
    "tp_similarity": "TP similarity",
    "fn_similarity": "FN similarity",
}
NOT_OF_THE_METHOD = ("exact",)
"""What another rule would have found in the method's place."""
DISTANCES = {"mae": "MAE", "rmse": "RMSE"}
"""Of thresholds, in similarity; the lower the better."""
JOURNAL = {
    "precision": "precision",
    "recall": "recall",
    "f1": "F1",
    "anchor_precision": "precision per anchor",
    "anchor_recall": "recall per anchor",
    "anchor_f1": "F1 per anchor",
    "flagged": "flagged",
    "mtpr": "MTPR",
    "mtnr": "MTNR",
    "nmi": "NMI",
    "features_nmi": "NMI of features",
    "tp_similarity": "TP similarity",
    "fn_similarity": "FN similarity",
}
SECONDS = "seconds"


def figures_of(record: Record) -> dict[str, float]:
    """Figures by name: `linear`, `semi 10 %`, … of the protocols, those of `JOURNAL`, and the median seconds of an epoch."""
    last = record.epochs[-1] if record.epochs else {}
    found = {name: 100 * last[name] for name in JOURNAL if name in last}
    for result in record.results:
        found |= measured(str(result["protocol"]), result)
    seconds = [epoch[SECONDS] for epoch in record.epochs if SECONDS in epoch]
    return found | ({SECONDS: statistics.median(seconds)} if seconds else {})


def measured(protocol: str, result: Mapping[str, Any]) -> dict[str, float]:
    """What a protocol found: its main figure under its own name, others under both names; of one that has parts, each part's main figure
    and top-5, and the average over the parts where there are several, as in the papers' tables.

    Example:
        >>> measured("semi", {"accuracy": 0.5, "fractions": [{"fraction": 0.1, "accuracy": 0.5}]})
        {'semi 10 %': 50.0}
        >>> shares = [{"fraction": 1, "accuracy": 0.75}, {"fraction": 0.5, "accuracy": 0.5}]
        >>> measured("semi", {"accuracy": 0.625, "fractions": shares})
        {'semi 100 %': 75.0, 'semi 50 %': 50.0, 'semi average': 62.5}
        >>> measured("kin", {"f1": 0.25, "threshold": {"mae": 0.02}})
        {'kin F1': 25.0, 'kin threshold MAE': 0.02}
    """
    if parts := parts_of(protocol, result):
        several = {f"{protocol} {AVERAGE}": result} if len(parts) > 1 else {}
        found = {
            (name if key in MAIN else f"{name} {SHARES[key]}"): 100 * float(value)
            for name, part in (parts | several).items()
            for key, value in part.items()
            if (key in MAIN or key == "top5") and _is_number(value)
        }
        return found
    return dict(_walk(protocol, result))


def parts_of(protocol: str, result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The parts of a result by name: shares of the labels (`semi 10 %`, or `semi 10percent` by a list), or data sets
    (`transfer cifar100`); empty where it has none."""
    shares = {
        f"{protocol} {part.get('subset') or format(100 * part['fraction'], 'g') + ' %'}": part for part in result.get("fractions", ())
    }
    return shares | {f"{protocol} {part['name']}": part for part in result.get("sets", ())}


def _walk(name: str, result: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in result.items():
        if key in DIRECTIONS:
            yield from ((f"{DIRECTIONS[key]} {rank}", 100 * float(share)) for rank, share in value.items())
        elif isinstance(value, Mapping) and key not in NOT_OF_THE_METHOD:
            yield from _walk(f"{name} {key}", value)
        elif not _is_number(value):
            continue
        elif key in MAIN:
            yield name, 100 * float(value)
        elif key in SHARES:
            yield f"{name} {SHARES[key]}", 100 * float(value)
        elif key in DISTANCES:
            yield f"{name} {DISTANCES[key]}", float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
