"""What the audit's page shows of single samples: anchors with their kin, groups and hubs.

Dimension key: N data set, P listed pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kinfolk.auditing.features import Ints

if TYPE_CHECKING:
    from kinfolk.auditing.result import Audit
    from kinfolk.data.images import ImageData
    from kinfolk.report.map import Sprites

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
    from kinfolk.report.map import sprite_sheet
    from kinfolk.report.material import square_pictures

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
