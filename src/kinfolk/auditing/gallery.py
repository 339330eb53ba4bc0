"""The samples that the page of an audit shows: anchors with their kin, groups, hubs, doubtful labels and outliers.

Dimension key: N data set, P listed pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kinfolk.auditing.inputs import Ints
from kinfolk.auditing.thumbnails import Thumbnails

if TYPE_CHECKING:
    from kinfolk.auditing.result import Audit
    from kinfolk.data.images import ImageData
    from kinfolk.report.maps import Sprites


ANCHORS, WRONG, HUBS, GROUPS, MEMBERS, DOUBTFUL = 60, 20, 12, 24, 8, 24


def gallery(audit: Audit) -> tuple[list[int], dict[str, Any]]:
    """Ids of the samples that are shown, and data for the page's script, which refers to samples by their position among these."""
    anchors = _anchors(audit)
    starts = np.searchsorted(audit.pairs["anchor"], anchors)
    stops = np.searchsorted(audit.pairs["anchor"], anchors, side="right")
    rows = [audit.pairs[start:stop] for start, stop in zip(starts, stops, strict=True)]
    groups = []
    for group in np.unique(audit.groups["group"])[:GROUPS]:
        members = audit.groups[audit.groups["group"] == group]
        groups.append({"kind": str(members["kind"][0]), "size": len(members), "samples": members["sample"][:MEMBERS].tolist()})
    hubs, mislabels, outliers = audit.hubs[:HUBS], audit.mislabels[:DOUBTFUL], audit.outliers[:HUBS]
    shown = {*anchors.tolist(), *(int(kin) for row in rows for kin in row["kin"])}
    shown |= {int(sample) for table in (hubs, mislabels, outliers) for sample in table["sample"]}
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
        "mislabels": [[place[int(row["sample"])], _doubt(audit, row)] for row in mislabels],
        "outliers": [[place[int(row["sample"])], f"similarity {row['similarity']:.2f}"] for row in outliers],
    }


def sprites(ids: list[int], images: ImageData | Thumbnails | None) -> Sprites | None:
    """The images of the samples in one sheet, in their order."""
    if images is None:
        return None
    from kinfolk.report.maps import sprite_sheet

    thumbnails = images if isinstance(images, Thumbnails) else Thumbnails(images)
    return sprite_sheet(thumbnails.squares(ids), thumbnails.size)


def _doubt(audit: Audit, row: Any) -> str:
    return f"{row['agreement']:.0%} of neighbours: {audit.class_name(int(row['suggested']))}"


def _anchors(audit: Audit) -> Ints:
    """Random anchors and, with labels, anchors whose closest kin has another label; in random order."""
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
    """Keys, texts and labels, in the form that the report uses too."""
    keys = [f"sample {sample}" if audit.keys is None else str(audit.keys[sample]) for sample in samples]
    texts = None if audit.texts is None else [audit.texts[sample] for sample in samples]
    if audit.labels is None:
        return {"keys": keys, "texts": texts, "labels": None, "classes": []}
    present, place = np.unique(audit.labels[samples], return_inverse=True)
    unknown = int((present < 0).sum())
    classes = [audit.classes[label] if audit.classes else str(label) for label in present[unknown:]]
    return {"keys": keys, "texts": texts, "labels": (place - unknown).tolist(), "classes": classes}
