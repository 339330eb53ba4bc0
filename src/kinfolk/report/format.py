"""Text and numbers of the report, formatted for the page: papers, facts, tiles, results, data,
configuration.

`fraction_panels` draws the accuracy at fractions of the labels (GloFND paper, Figure 4).
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

from kinfolk.errors import counted
from kinfolk.report.html import Panel, figure, line
from kinfolk.report.run_summary import Record
from kinfolk.training.documents import first_warnings


def papers_of(record: Record) -> list[tuple[str, str]]:
    """Name and paper of the framework and the detector; empty for a method unknown to this
    version."""
    from kinfolk.detectors import DETECTORS
    from kinfolk.frameworks import FRAMEWORKS
    from kinfolk.frameworks.registry import parse

    try:
        method = parse(str(record.config.get("method", "")))
    except ValueError:
        return []
    papers = [(method.framework, FRAMEWORKS[method.framework].paper)]
    if method.detector is not None:
        papers.append((method.detector, DETECTORS[method.detector].paper))
    return papers


def _rate(config: Mapping[str, Any]) -> str:
    """The learning rate that is used, and the setting if it was scaled by the batch size."""
    from kinfolk.training.optimizers import scaled_lr

    optimizer = _section(config, "optimizer")
    try:
        used = scaled_lr(
            optimizer["lr"],
            config["batch_size"] * _section(config, "trainer").get("accumulate", 1),
            optimizer["lr_scaling"],
        )
    except (KeyError, TypeError, ValueError):
        return str(optimizer.get("lr"))
    return (
        f"{used:.4g}"
        if used == optimizer["lr"]
        else f"{used:.4g} ({optimizer['lr']:g}, scaling {optimizer['lr_scaling']})"
    )


def facts_of(record: Record) -> list[tuple[str, str]]:
    """Label and value of the main settings, as far as the run records them."""
    config, meta = record.config, record.meta
    model, optimizer = _section(config, "model"), _section(config, "optimizer")
    width = f", width {model['width']}" if model.get("width") else ""
    parameters = (
        f", {meta['parameters'] / 1e6:.2g} M parameters"
        if isinstance(meta.get("parameters"), int)
        else ""
    )
    size = _section(config, "views").get("size")
    lines = [
        ("Data", _section(config, "data").get("source")),
        ("Encoder", f"{model['name']}{width}{parameters}" if "name" in model else None),
        (
            "Views",
            f"{_section(config, 'views').get('preset', '')}, {size} × {size}" if size else None,
        ),
        ("Batch size", config.get("batch_size")),
        (
            "Optimiser",
            f"{optimizer['name']}, learning rate {_rate(config)}" if "name" in optimizer else None,
        ),
        ("Seed", config.get("seed")),
        (
            "Speed",
            (
                f"{speed:,.0f} samples/s"
                if (speed := record.last("images_per_second")) is not None
                else None
            ),
        ),
        ("Software", _versions(meta)),
        *(("Warning", message) for message in first_warnings(record.epochs).values()),
    ]
    return [(label, str(value)) for label, value in lines if value not in (None, "")]


def normaliser_of(record: Record) -> str:
    """The normaliser of the run's NMI; runs of earlier versions do not record it and used the
    arithmetic mean."""
    return str(_section(record.config, "knn").get("nmi_normaliser", "arithmetic"))


def _has_text(method: str) -> bool:
    """Whether the method learns from captions; True for a method unknown to this version."""
    from kinfolk.frameworks import FRAMEWORKS

    framework = FRAMEWORKS.get(method.partition("+")[0].strip().lower())
    return framework is None or "text" in framework.modalities


def of_images(method: str) -> bool:
    """Whether the method learns from images; True for a method unknown to this version."""
    from kinfolk.frameworks import FRAMEWORKS

    framework = FRAMEWORKS.get(method.partition("+")[0].strip().lower())
    return framework is None or "image" in framework.modalities


def _versions(meta: Mapping[str, Any]) -> str:
    """Versions that the run recorded, or else those installed now."""
    inner = meta.get("meta")
    recorded = inner.get("versions") if isinstance(inner, Mapping) else None
    if isinstance(recorded, Mapping):
        return ", ".join(f"{name} {version}" for name, version in recorded.items())
    names = ", ".join(f"{name} {metadata.version(name)}" for name in ("kinfolk", "torch"))
    return f"{names}, Python {platform.python_version()}"


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


LINES = {"semi": ("linear probe", "accent"), "finetune": ("fine-tuning", "second")}
Point = tuple[float, float, float | None]
"""Fraction of the labels, accuracy, and its standard deviation if there is one."""


def fraction_panels(results: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """One panel with a line for each protocol that measured at fractions of the labels; empty
    without such results."""
    found = {each["protocol"]: points(each) for each in results if each.get("protocol") in LINES}
    found = {name: found[name] for name in LINES if found.get(name)}
    if not found:
        return []
    traces, described = [], []
    for name, values in found.items():
        label, colour = LINES[name]
        shares, accuracies, deviations = zip(*values, strict=True)
        bars = {
            "type": "data",
            "array": [deviation or 0 for deviation in deviations],
            "color": "soft",
            "thickness": 1,
        }
        more: dict[str, Any] = {"error_y": bars} if any(deviations) else {}
        traces.append(
            line(
                label,
                shares,
                accuracies,
                colour,
                mode="lines+markers",
                hovertemplate="%{y:.2%}",
                **more,
            )
        )
        described.append(
            f"{label}: "
            + ", ".join(
                f"{accuracy:.1%} with {share:.4g} of the labels" for share, accuracy, _ in values
            )
        )
    drawn = figure(traces, "fraction of the labels", share=True)
    ticks = sorted({share for values in found.values() for share, _, _ in values})
    drawn["layout"]["xaxis"] |= {
        "type": "log",
        "tickvals": ticks,
        "ticktext": [f"{100 * share:.4g} %" for share in ticks],
    }
    drawn["layout"]["yaxis"]["rangemode"] = "normal"
    return [
        Panel(
            "fractions",
            "Accuracy at fractions of the labels",
            "mean and standard deviation over draws",
            "; ".join(described),
            drawn,
        )
    ]


def points(result: Mapping[str, Any]) -> list[Point]:
    """Accuracy by fraction; entries that are missing or not numbers are skipped."""
    rows = result.get("fractions")
    rows = rows if isinstance(rows, list) else []
    found = [
        (
            float(row["fraction"]),
            float(row["accuracy"]),
            row.get("deviation") if _number(row.get("deviation")) else None,
        )
        for row in rows
        if isinstance(row, Mapping)
        and _number(row.get("fraction"))
        and row["fraction"] > 0
        and _number(row.get("accuracy"))
    ]
    return sorted(found, key=lambda point: point[0])


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


PROTOCOLS = {
    "knn": "Weighted kNN",
    "linear": "Linear probe",
    "finetune": "Fine-tuning",
    "semi": "Few labels",
    "transfer": "Transfer",
    "kin": "False negatives",
    "clusters": "Clusters",
    "retrieval": "Retrieval, mean recall",
    "zero-shot": "Zero-shot",
    "sts": "Text similarity, Spearman",
}
MAIN = {"retrieval": "mean", "sts": "spearman"}
"""Main figures of protocols that measure no accuracy."""
DETECTION_NAMES = {
    "precision": "precision",
    "recall": "recall",
    "f1": "F1",
    "anchor_precision": "precision per anchor",
    "anchor_recall": "recall per anchor",
    "anchor_f1": "F1 per anchor",
}
"""Names of how well false negatives are detected, over pairs and per anchor."""
NAMES = {
    "top5": "top-5",
    "flagged": "flagged",
    **DETECTION_NAMES,
    "mtpr": "MTPR",
    "mtnr": "MTNR",
    "nmi": "NMI",
    "label_map": "mAP by label",
    "label_ndcg": "nDCG@10 by label",
}
"""Names of results that are shares."""
MAX_ROWS = 12
MAX_FILES = 200


def number(value: Any) -> str:
    """A setting or a result in readable form."""
    if value is None or value in ("", [], {}, ()):
        return "—"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "—" if math.isnan(value) else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(number(entry) for entry in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {number(entry)}" for key, entry in value.items())
    return str(value)


def percent(value: Any) -> str:
    """A share with one decimal, more where it is tiny."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return "—"
    return f"{value:.3%}" if 0 < abs(value) < 0.001 else f"{value:.1%}"


def duration(seconds: float) -> str:
    """12 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"


def summary(record: Record) -> str:
    """The sentence under the title."""
    epochs = len(record.epochs)
    planned = record.config.get("epochs")
    trained = (
        f"{epochs} of {planned} epochs"
        if isinstance(planned, int) and planned != epochs
        else counted(epochs, "epoch")
    )
    number = record.splits.get("train", 0)
    what = "images" if of_images(str(record.config.get("method", ""))) else "text pairs"
    return f"trained for {trained}" + (f" on {number:,} {what}" if number else "")


def tiles(record: Record) -> list[tuple[str, str, str]]:
    """Name, value and note of the tiles at the top, for the metrics that the run has."""
    found = []
    epochs = len(record.epochs)
    if record.labelled and (knn := record.last("knn")) is not None:
        best = max(row["knn"] for row in record.epochs if math.isfinite(row.get("knn", math.nan)))
        found.append(("kNN accuracy", percent(knn), f"best {percent(best)}"))
    for result in record.results:
        accuracy = result.get("accuracy")
        if result["protocol"] == "linear" and isinstance(accuracy, (int, float)):
            five = result.get("top5")
            more = f", top-5 {percent(five)}" if isinstance(five, (int, float)) else ""
            found.append(("Linear probe", percent(accuracy), f"on frozen features{more}"))
        if result["protocol"] == "retrieval":
            found.append(
                (
                    "Mean recall",
                    percent(result.get("mean")),
                    "at 1, 5 and 10, both ways, of "
                    + (
                        f"{number(result['images'])} images"
                        if "images" in result
                        else f"{number(result.get('anchors'))} texts"
                    ),
                )
            )
    if record.labelled and (f1 := record.last("f1")) is not None:
        note = (
            f"precision {percent(record.last('precision'))}, recall"
            f" {percent(record.last('recall'))}"
        )
        note += (
            f"; per anchor F1 {percent(by_anchor)}"
            if (by_anchor := record.last("anchor_f1")) is not None
            else ""
        )
        found.append(("Detection F1", percent(f1), note))
    if (flagged := record.last("flagged")) is not None:
        found.append(("Pairs flagged", percent(flagged), "of the negatives"))
    if (loss := record.last("loss")) is not None:
        found.append(("Loss", f"{loss:.3f}", f"epoch {epochs}"))
    if seconds := sum(row.get("seconds", 0.0) for row in record.epochs):
        found.append(("Training time", duration(seconds), f"{seconds / epochs:.3g} s per epoch"))
    return found


def results(record: Record) -> list[dict[str, Any]]:
    """Rows of the table of results."""
    rows = []
    for result in record.results:
        accuracy = result.get(MAIN.get(result["protocol"], "accuracy"))
        known = isinstance(accuracy, (int, float)) and math.isfinite(accuracy)
        several = any(len(_rows(result, parts)) > 1 for parts in ("fractions", "sets"))
        rows.append(
            {
                "title": (
                    PROTOCOLS.get(result["protocol"], result["protocol"])
                    + (", average" if several else "")
                ),
                "accuracy": percent(accuracy) if known else "—",
                "share": (
                    round(100 * min(max(float(accuracy), 0.0), 1.0), 1)
                    if known and accuracy is not None
                    else None
                ),
                "details": _details(result),
            }
        )
    return rows


def _details(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Everything else in a result: accuracies at fractions of the labels or on several data sets,
    other metrics, settings."""
    own = [(str(each.get("name")), percent(each.get("accuracy"))) for each in _rows(result, "sets")]
    shares = [
        each
        for each in _rows(result, "fractions")
        if isinstance(each.get("fraction"), (int, float))
    ]
    own += [
        (each.get("subset") or f"{100 * each['fraction']:g} %", _with_top5(each)) for each in shares
    ]
    main = MAIN.get(str(result.get("protocol")), "accuracy")
    hidden = ("protocol", "accuracy", "fractions", "sets", main)
    return own + [
        (NAMES.get(key) or key.replace("_", " "), _detail(key, value))
        for key, value in result.items()
        if key not in hidden
    ]


def _rows(result: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    parts = result.get(name)
    return [each for each in parts if isinstance(each, Mapping)] if isinstance(parts, list) else []


def _detail(key: str, value: Any) -> str:
    if isinstance(value, Mapping) and any(str(name).startswith("R@") for name in value):
        return ", ".join(f"{name} {percent(share)}" for name, share in value.items())
    if key == "exact" and isinstance(value, Mapping):
        return ", ".join(
            f"{NAMES.get(name, name)} {_detail(name, share)}" for name, share in value.items()
        )
    return percent(value) if key == "chance" or key in NAMES else number(value)


def _with_top5(row: Mapping[str, Any]) -> str:
    five = row.get("top5")
    return percent(row.get("accuracy")) + (
        f" (top-5 {percent(five)})" if isinstance(five, (int, float)) else ""
    )


def bars(counts: Iterable[tuple[str, int]], limit: int = MAX_ROWS) -> list[dict[str, Any]]:
    """Rows of a bar list; the largest value fills its bar."""
    rows = list(counts)[:limit]
    largest = max((count for _, count in rows), default=1)
    return [
        {"name": name, "count": f"{count:,}", "share": round(100 * count / largest, 1)}
        for name, count in rows
    ]


def data_tables(record: Record) -> list[dict[str, Any]]:
    """Samples per split and per class."""
    tables = []
    if record.splits:
        tables.append({"title": "Samples", "rows": bars(record.splits.items()), "rest": ""})
    if record.classes:
        more = len(record.classes) - MAX_ROWS
        rest = f"and {more:,} more" if more > 0 else ""
        tables.append(
            {
                "title": counted(len(record.classes), "class"),
                "rows": bars(record.classes.items()),
                "rest": rest,
            }
        )
    return tables


def quarantine(record: Record) -> dict[str, Any] | None:
    """Number of refused files and the reasons; None if all were read."""
    if not record.quarantine:
        return None
    reasons: dict[str, int] = {}
    for _, reason in record.quarantine:
        reasons[reason] = reasons.get(reason, 0) + 1
    count = len(record.quarantine)
    return {
        "sentence": (
            f"{count:,} file{' was' if count == 1 else 's were'} refused and not used for training."
        ),
        "reasons": bars(sorted(reasons.items(), key=lambda row: -row[1])),
        "files": record.quarantine[:MAX_FILES],
        "rest": f"and {count - MAX_FILES:,} more in quarantine.csv" if count > MAX_FILES else "",
    }


def configuration(
    config: Mapping[str, Any], labelled: bool = True
) -> list[tuple[str, list[tuple[str, str]]]]:
    """The settings by section, general settings first. Sections without effect are left out: the
    text tower of a method without one, and the kNN accuracy of a run without labels."""
    general = [
        (key, number(value)) for key, value in config.items() if not isinstance(value, Mapping)
    ]
    unused = set() if labelled else {"knn"}
    if not _has_text(str(config.get("method", ""))):
        unused.add("text")
    sections = [
        (key, [(name, number(entry)) for name, entry in value.items()])
        for key, value in config.items()
        if isinstance(value, Mapping)
        and key not in unused
        and any(entry not in (None, [], {}) for entry in value.values())
    ]
    return [("run", general), *((key, rows) for key, rows in sections if rows)]
