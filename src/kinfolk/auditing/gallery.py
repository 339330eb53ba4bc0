"""What the audit's page shows of single samples: anchors with their kin, groups and hubs.

Dimension key: N data set, P listed pairs.

What the command is pointed at: features, and where there are any the pictures, names and labels of their rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kinfolk.auditing.inputs import Ints, class_names, run_material
from kinfolk.errors import UsageError

if TYPE_CHECKING:
    from kinfolk.auditing.result import Audit
    from kinfolk.data.images import ImageData
    from kinfolk.report.maps import Sprites


ANCHORS, WRONG, HUBS, GROUPS, MEMBERS = 60, 20, 12, 24, 8
TILE = 56


def gallery(audit: Audit) -> tuple[list[int], dict[str, Any]]:
    """The samples that are shown, and plain data for the page's script, which names them by their place among these."""
    anchors = _anchors(audit)
    starts = np.searchsorted(audit.pairs["anchor"], anchors)
    stops = np.searchsorted(audit.pairs["anchor"], anchors, side="right")
    rows = [audit.pairs[start:stop] for start, stop in zip(starts, stops, strict=True)]
    groups = []
    for group in np.unique(audit.groups["group"])[:GROUPS]:
        members = audit.groups[audit.groups["group"] == group]
        groups.append({"kind": str(members["kind"][0]), "size": len(members), "samples": members["sample"][:MEMBERS].tolist()})
    hubs = audit.hubs[:HUBS]
    shown = {*anchors.tolist(), *(int(kin) for row in rows for kin in row["kin"]), *hubs["sample"].tolist()}
    shown |= {sample for group in groups for sample in group["samples"]}
    samples = sorted(shown)
    place = {sample: at for at, sample in enumerate(samples)}
    return samples, {
        "samples": _described(audit, samples),
        "anchors": [place[int(anchor)] for anchor in anchors],
        "thresholds": [round(float(audit.thresholds[anchor]), 4) for anchor in anchors],
        "flagged": [int(audit.flagged[anchor]) for anchor in anchors],
        "kin": [[place[int(kin)] for kin in row["kin"]] for row in rows],
        "similarity": [[round(float(similarity), 4) for similarity in row["similarity"]] for row in rows],
        "groups": [{**group, "samples": [place[sample] for sample in group["samples"]]} for group in groups],
        "hubs": [[place[int(hub["sample"])], int(hub["occurrence"]), round(float(hub["times_expected"]), 1)] for hub in hubs],
    }


def sprites(ids: list[int], images: ImageData | None) -> Sprites | None:
    """The pictures of the samples in one sheet, in their order."""
    if images is None:
        return None
    from kinfolk.report.maps import sprite_sheet, square_pictures

    size = min(TILE, max(images.height, images.width))
    return sprite_sheet(square_pictures(images, np.asarray(ids, dtype=np.int64), size), size)


def _anchors(audit: Audit) -> Ints:
    """Some at random and, with labels, those whose closest kin has another label; in a random order."""
    rng = np.random.default_rng(0)
    with_kin = np.unique(audit.pairs["anchor"])
    chosen = rng.choice(with_kin, min(ANCHORS, len(with_kin)), replace=False)
    if audit.labels is not None:
        first = audit.pairs[audit.pairs["rank"] == 1]
        one, other = audit.labels[first["anchor"]], audit.labels[first["kin"]]
        wrong = first[(one >= 0) & (other >= 0) & (one != other)]
        chosen = np.concatenate([chosen, wrong["anchor"][np.argsort(-wrong["similarity"], kind="stable")][:WRONG]])
    return rng.permutation(np.unique(chosen)).astype(np.int64)


def _described(audit: Audit, samples: list[int]) -> dict[str, Any]:
    """Names and labels, in the form of the report's."""
    keys = [f"sample {sample}" if audit.names is None else str(audit.names[sample]) for sample in samples]
    if audit.labels is None:
        return {"keys": keys, "labels": None, "classes": []}
    present, place = np.unique(audit.labels[samples], return_inverse=True)
    unknown = int((present < 0).sum())
    classes = [audit.classes[label] if audit.classes else str(label) for label in present[unknown:]]
    return {"keys": keys, "labels": (place - unknown).tolist(), "classes": classes}


@dataclass(frozen=True)
class Material:
    """Features as a path or array; the rest where it is known."""

    features: Any
    labels: list[Any] | None = None
    names: list[str] | None = None
    images: ImageData | None = None


@contextmanager
def features_and_images(
    features: Path, images: str | None = None, labels_from_folders: bool = False, workers: int | None = None, progress: bool = True
) -> Iterator[Material]:
    """A run brings its own pictures; for a file they are read from `images`, whose samples must be its rows."""
    if (features / "config.yaml").is_file():
        if images is not None:
            raise UsageError(f"`{features}` is a run, which has its own pictures; leave out --images")
        array, labels, names, data = run_material(features, progress)
        yield Material(array, labels, names, data)
        return
    if images is None:
        yield Material(features)
        return
    from kinfolk.data.open_source import open_source
    from kinfolk.data.prepare import prepare

    source = open_source(images, labels_from_folders=labels_from_folders)
    with tempfile.TemporaryDirectory(prefix="kinfolk-audit-") as cache:
        data = prepare(source, image_size=TILE, workers=workers, cache_dir=Path(cache), progress=progress)
        if data.quarantine:
            path, reason = data.quarantine[0]
            raise UsageError(
                f"{len(data.quarantine):,} pictures of `{images}` can't be read (the first is {path}: {reason}), so its samples are "
                "not the rows of the features; remove them there and here, or leave out --images"
            )
        yield Material(features, class_names(data, len(data)), list(data.samples.keys), data)
