"""What was run: the papers behind the method, and the settings a reader asks for first."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from kinfolk.report.record import Record


def papers_of(record: Record) -> list[tuple[str, str]]:
    """Name and paper of the framework and the detector; empty for a method this version does not know."""
    from kinfolk.detectors import DETECTORS
    from kinfolk.frameworks import FRAMEWORKS
    from kinfolk.frameworks.method import parse

    try:
        method = parse(str(record.config.get("method", "")))
    except ValueError:
        return []
    papers = [(method.framework, FRAMEWORKS[method.framework].paper)]
    if method.detector is not None:
        papers.append((method.detector, DETECTORS[method.detector].paper))
    return papers


def facts_of(record: Record) -> list[tuple[str, str]]:
    """Label and value of each fact the run states."""
    config, meta = record.config, record.meta
    model, optimizer = _section(config, "model"), _section(config, "optimizer")
    width = f", width {model['width']}" if model.get("width") else ""
    parameters = f", {meta['parameters'] / 1e6:.2g} M parameters" if isinstance(meta.get("parameters"), int) else ""
    size = _section(config, "views").get("size")
    lines = [
        ("Data", _section(config, "data").get("source")),
        ("Encoder", f"{model['name']}{width}{parameters}" if "name" in model else None),
        ("Views", f"{_section(config, 'views').get('preset', '')}, {size} × {size}" if size else None),
        ("Batch size", config.get("batch_size")),
        ("Optimiser", f"{optimizer['name']}, learning rate {optimizer.get('lr')}" if "name" in optimizer else None),
        ("Seed", config.get("seed")),
        ("Speed", f"{speed:,.0f} images/s" if (speed := record.last("images_per_second")) is not None else None),
        ("Software", _versions(meta)),
    ]
    return [(label, str(value)) for label, value in lines if value not in (None, "")]


def normaliser_of(record: Record) -> str:
    """What the run divided its NMI by; runs of earlier versions do not say, and took the arithmetic mean."""
    return str(_section(record.config, "knn").get("nmi_normaliser", "arithmetic"))


def _versions(meta: Mapping[str, Any]) -> str:
    """What the run recorded, or what is installed now."""
    inner = meta.get("meta")
    recorded = inner.get("versions") if isinstance(inner, Mapping) else None
    if isinstance(recorded, Mapping):
        return ", ".join(f"{name} {version}" for name, version in recorded.items())
    names = ", ".join(f"{name} {metadata.version(name)}" for name in ("kinfolk", "torch"))
    return f"{names}, Python {platform.python_version()}"


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}
