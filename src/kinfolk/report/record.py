"""What a run folder records, without the model and the images, and its text for the page: papers,
facts, tiles, results, configuration.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from kinfolk.data.prepare import read_quarantine
from kinfolk.errors import KinfolkError, KinfolkWarning, UsageError, duration, plural
from kinfolk.files import first_line
from kinfolk.report.html import Panel, figure, line
from kinfolk.training.documents import (
    describe_torn_lines,
    first_warnings,
    read_rows,
    read_yaml,
)

# ---- reading


@dataclass(frozen=True)
class Record:
    """The small files of a run.

    Args:
        config, meta: `config.yaml`, fully resolved, and `model.json`.
        epochs: `metrics.jsonl`, one entry for each epoch; of a repeated epoch the last.
        results: `eval/*.json`.
        num_train, num_refused: number of training samples (0 if not known) and of refused files.
        labelled: whether the samples have labels; True if it is not known.
    """

    path: Path
    config: dict[str, Any]
    meta: dict[str, Any]
    epochs: list[dict[str, float]]
    results: list[dict[str, Any]]
    num_train: int = 0
    num_refused: int = 0
    labelled: bool = True

    @property
    def method(self) -> str:
        return str(self.config.get("method", ""))

    def section(self, name: str) -> Mapping[str, Any]:
        """A section of the configuration; empty if there is none."""
        section = self.config.get(name)
        return section if isinstance(section, Mapping) else {}

    def values(self, metric: str) -> list[float]:
        """The finite values of a metric."""
        values = (row.get(metric, math.nan) for row in self.epochs)
        return [value for value in values if math.isfinite(value)]

    def last(self, metric: str) -> float | None:
        values = self.values(metric)
        return values[-1] if values else None


def read_record(run: Path) -> Record:
    """Reads the run folder; every file but `config.yaml` may be missing."""
    hint = "give the folder that `kinfolk train --out` wrote"
    if not run.is_dir():
        raise UsageError(f"there is no run folder at {run}; {hint}")
    if not (run / "config.yaml").is_file():
        raise UsageError(f"{run} is not a run folder: it has no config.yaml; {hint}")
    refused, samples = run / "quarantine.csv", run / "samples.parquet"
    num_train, labelled = _read_samples(samples) if samples.is_file() else (0, True)
    return Record(
        path=run.resolve(),
        config=read_yaml(run / "config.yaml"),
        meta=_read_json(run / "model.json"),
        epochs=_read_epochs(run / "metrics.jsonl"),
        results=[
            {"protocol": file.stem, **_read_json(file)}
            for file in sorted((run / "eval").glob("*.json"))
        ],
        num_train=num_train,
        num_refused=len(read_quarantine(refused)) if refused.is_file() else 0,
        labelled=labelled,
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise KinfolkError(
            f"{path} is not valid JSON ({first_line(error)}); restore it, or remove it"
        ) from error
    return value if isinstance(value, dict) else {}


def _read_epochs(path: Path) -> list[dict[str, float]]:
    """Reads the metrics. A line that was cut off, as by a killed run, is skipped with a warning."""
    rows, torn = read_rows(path)
    if torn:
        warnings.warn(describe_torn_lines(path, torn), KinfolkWarning, stacklevel=2)
    by_epoch: dict[int, dict[str, float]] = {}
    for row in rows:
        numbers = {name: float(value) for name, value in row.items() if is_number(value)}
        by_epoch[row["epoch"]] = numbers
    return [by_epoch[epoch] for epoch in sorted(by_epoch)]


def _read_samples(path: Path) -> tuple[int, bool]:
    """Number of training samples, and whether any sample has a label."""
    from kinfolk.data.sample_table import Samples

    samples = Samples.read(path)
    labels = samples.labels
    return samples.num_train, labels is not None and bool((labels >= 0).any())


# ---- numbers in words


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_finite(value: Any) -> TypeGuard[float]:
    return is_number(value) and math.isfinite(value)


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
        return ", ".join(map(number, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {number(entry)}" for key, entry in value.items())
    return str(value)


def percent(value: Any) -> str:
    """A share with one decimal, more where it is tiny."""
    if not is_finite(value):
        return "—"
    return f"{value:.3%}" if 0 < abs(value) < 0.001 else f"{value:.1%}"


# ---- the head of the page


def papers_of(record: Record) -> list[tuple[str, str]]:
    """Name and paper of the framework and the detector; empty for an unknown method."""
    from kinfolk.detectors import DETECTORS
    from kinfolk.frameworks import FRAMEWORKS
    from kinfolk.frameworks.registry import parse

    try:
        method = parse(record.method)
    except ValueError:
        return []
    papers = [(method.framework, FRAMEWORKS[method.framework].paper)]
    if method.detector is not None:
        papers.append((method.detector, DETECTORS[method.detector].paper))
    return papers


LEARNS_FROM = {("image",): "images", ("image", "text"): "captions", ("text",): "text pairs"}
"""What a sample is, by the modalities of the framework."""


def modalities_of(method: str) -> tuple[str, ...]:
    """The modalities that a method learns from; empty for an unknown method."""
    from kinfolk.frameworks import FRAMEWORKS

    framework = FRAMEWORKS.get(method.partition("+")[0].strip().lower())
    return () if framework is None else framework.modalities


def describe_training(record: Record) -> str:
    """The sentence under the title."""
    epochs, planned = len(record.epochs), record.config.get("epochs")
    unfinished = isinstance(planned, int) and planned != epochs
    trained = f"{epochs} of {planned} epochs" if unfinished else plural(epochs, "epoch")
    what = LEARNS_FROM.get(modalities_of(record.method), "images")
    samples = f" on {record.num_train:,} {what}" if record.num_train else ""
    return f"trained for {trained}{samples}"


def facts_of(record: Record) -> list[tuple[str, str]]:
    """Label and value of the main settings, as far as the run records them."""
    config, meta = record.config, record.meta
    model, optimizer, views = (record.section(name) for name in ("model", "optimizer", "views"))
    encoder, parameters = str(model.get("name", "")), meta.get("parameters")
    if encoder and model.get("width"):
        encoder += f", width {model['width']}"
    if encoder and isinstance(parameters, int):
        encoder += f", {parameters / 1e6:.2g} M parameters"
    size, speed = views.get("size"), record.last("images_per_second")
    name, refused = optimizer.get("name"), plural(record.num_refused, "file")
    facts = [
        ("Data", record.section("data").get("source")),
        ("Encoder", encoder),
        ("Views", f"{views.get('preset', '')}, {size} × {size}" if size else None),
        ("Batch size", config.get("batch_size")),
        ("Optimiser", f"{name}, learning rate {_rate(optimizer)}" if name else None),
        ("Seed", config.get("seed")),
        ("Speed", None if speed is None else f"{speed:,.0f} samples/s"),
        ("Refused", f"{refused}, see quarantine.csv" if record.num_refused else None),
        *(("Warning", message) for message in first_warnings(record.epochs).values()),
    ]
    return [(label, str(value)) for label, value in facts if value not in (None, "")]


def _rate(optimizer: Mapping[str, Any]) -> str:
    """The setting, and how it is scaled by the batch size."""
    lr, scaling = number(optimizer.get("lr")), optimizer.get("lr_scaling")
    return lr if scaling in (None, "none") else f"{lr}, {scaling} scaling"


def tiles(record: Record) -> list[tuple[str, str, str]]:
    """Name, value and note of the tiles at the top, for the metrics that the run has."""
    found = []
    if record.labelled and (knn := record.values("knn")):
        found.append(("kNN accuracy", percent(knn[-1]), f"best {percent(max(knn))}"))
    for result in record.results:
        if result["protocol"] == "linear" and is_number(result.get("accuracy")):
            more = f", top-5 {percent(result['top5'])}" if is_number(result.get("top5")) else ""
            found.append(("Linear probe", percent(result["accuracy"]), f"on frozen features{more}"))
        if result["protocol"] == "retrieval":
            images = "images" in result
            of = number(result["images"] if images else result.get("anchors"))
            note = f"at 1, 5 and 10, both ways, of {of} {'images' if images else 'texts'}"
            found.append(("Mean recall", percent(result.get("mean")), note))
    if record.labelled and (f1 := record.last("f1")) is not None:
        precision, recall = (percent(record.last(name)) for name in ("precision", "recall"))
        note = f"precision {precision}, recall {recall}"
        if (by_anchor := record.last("anchor_f1")) is not None:
            note += f"; per anchor F1 {percent(by_anchor)}"
        found.append(("Detection F1", percent(f1), note))
    if (flagged := record.last("flagged")) is not None:
        found.append(("Pairs flagged", percent(flagged), "of the negatives"))
    epochs = len(record.epochs)
    if (loss := record.last("loss")) is not None:
        found.append(("Loss", f"{loss:.3f}", f"epoch {epochs}"))
    if seconds := sum(row.get("seconds", 0.0) for row in record.epochs):
        found.append(("Training time", duration(seconds), f"{seconds / epochs:.3g} s per epoch"))
    return found


# ---- results

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


def results(record: Record) -> list[dict[str, Any]]:
    """Rows of the table of results."""
    rows = []
    for result in record.results:
        protocol = result["protocol"]
        value = result.get(MAIN.get(protocol, "accuracy"))
        several = any(len(_parts(result, name)) > 1 for name in ("fractions", "sets"))
        share = round(100 * min(max(float(value), 0.0), 1.0), 1) if is_finite(value) else None
        title = PROTOCOLS.get(protocol, protocol) + (", average" if several else "")
        row = {"title": title, "accuracy": percent(value), "share": share}
        rows.append({**row, "details": _details(result)})
    return rows


def _details(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Everything else in a result."""
    details = [(str(s.get("name")), percent(s.get("accuracy"))) for s in _parts(result, "sets")]
    for part in _parts(result, "fractions"):
        if is_number(part.get("fraction")):
            five = f" (top-5 {percent(part['top5'])})" if is_number(part.get("top5")) else ""
            name = part.get("subset") or f"{100 * part['fraction']:g} %"
            details.append((name, percent(part.get("accuracy")) + five))
    main = MAIN.get(str(result.get("protocol")), "accuracy")
    hidden = ("protocol", "accuracy", "fractions", "sets", main)
    for key, value in result.items():
        if key not in hidden:
            details.append((NAMES.get(key) or key.replace("_", " "), _detail(key, value)))
    return details


def _parts(result: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    parts = result.get(name)
    return [each for each in parts if isinstance(each, Mapping)] if isinstance(parts, list) else []


def _detail(key: str, value: Any) -> str:
    if isinstance(value, Mapping) and any(str(name).startswith("R@") for name in value):
        return ", ".join(f"{name} {percent(share)}" for name, share in value.items())
    if key == "exact" and isinstance(value, Mapping):
        return ", ".join(f"{NAMES.get(name, name)} {_detail(name, v)}" for name, v in value.items())
    return percent(value) if key == "chance" or key in NAMES else number(value)


FRACTION_LINES = {"semi": ("linear probe", "accent"), "finetune": ("fine-tuning", "second")}


def fraction_panels(results: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Accuracy at fractions of the labels (GloFND paper, Figure 4), a line for each protocol."""
    traces, described, fractions = [], [], set[float]()
    for protocol, (label, colour) in FRACTION_LINES.items():
        parts = [
            part
            for result in results
            if result.get("protocol") == protocol
            for part in _parts(result, "fractions")
            if is_finite(part.get("fraction")) and part["fraction"] > 0
            if is_finite(part.get("accuracy"))
        ]
        if not parts:
            continue
        parts.sort(key=lambda part: float(part["fraction"]))
        x, y = [part["fraction"] for part in parts], [part["accuracy"] for part in parts]
        bars = [b if is_finite(b) else 0 for b in (part.get("deviation") for part in parts)]
        traces.append(line(label, x, y, colour, mode="lines+markers", hovertemplate="%{y:.2%}"))
        if any(bars):
            style = {"color": "soft", "thickness": 1}
            traces[-1]["error_y"] = {"type": "data", "array": bars, **style}
        values = [f"{b:.1%} with {a:.4g} of the labels" for a, b in zip(x, y, strict=True)]
        described.append(f"{label}: {', '.join(values)}")
        fractions.update(x)
    if not traces:
        return []
    drawn, ticks = figure(traces, "fraction of the labels", share=True), sorted(fractions)
    names = [f"{100 * share:.4g} %" for share in ticks]
    drawn["layout"]["xaxis"] |= {"type": "log", "tickvals": ticks, "ticktext": names}
    drawn["layout"]["yaxis"]["rangemode"] = "normal"
    title = "Accuracy at fractions of the labels"
    note = "mean and standard deviation over draws"
    return [Panel("fractions", title, note, "; ".join(described), drawn)]


# ---- configuration


def configuration(
    config: Mapping[str, Any], labelled: bool = True
) -> list[tuple[str, list[tuple[str, str]]]]:
    """The settings by section, general settings first. Sections without effect are left out."""
    unused = set() if labelled else {"knn"}
    if modalities_of(str(config.get("method", ""))) == ("image",):
        unused.add("text")
    sections: dict[str, list[tuple[str, str]]] = {"run": []}
    for key, value in config.items():
        if not isinstance(value, Mapping):
            sections["run"].append((key, number(value)))
        elif key not in unused and any(entry not in (None, [], {}) for entry in value.values()):
            sections[key] = [(name, number(entry)) for name, entry in value.items()]
    return list(sections.items())
