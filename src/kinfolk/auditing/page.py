"""audit.html, the page of an audit."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kinfolk.auditing.verdict import UNKNOWN, Provenance, suggest_alpha, verdict
from kinfolk.errors import KinfolkError
from kinfolk.features import Ints
from kinfolk.report.html import Panel, figure, line, outlines, rounded, write_page

if TYPE_CHECKING:
    from kinfolk.auditing.run_audit import Audit
    from kinfolk.data.images import ImageData
    from kinfolk.data.source import Source

SCRIPTS = ("auditing/audit_marks.js", "report/gallery.js", "auditing/audit.js")
TILE = 160
_PIXEL_CAP = 500_000_000
ANCHORS, WRONG, HUBS, GROUPS, MEMBERS, DOUBTFUL = 60, 20, 12, 24, 8, 24
"""How many samples, groups and members of a group the page shows."""


class Thumbnails:
    """Square thumbnails, from the originals in `source` where they can be read."""

    def __init__(self, images: ImageData, source: Source | None = None) -> None:
        self.images, self.source = images, source
        samples, cached = images.samples, max(images.height, images.width)
        longest = int(max(samples.widths.max(initial=1), samples.heights.max(initial=1)))
        self.size = min(TILE, cached if source is None else longest)

    def squares(self, ids: list[int]) -> list[NDArray[np.uint8]]:
        """(size, size, 3) for each of `ids`: the whole image on a black square."""
        from PIL import Image, ImageOps

        from kinfolk.data.decode import RefusedError, decode
        from kinfolk.report.maps import square_images

        samples, source, squares = self.images.samples, self.source, []
        items = () if source is None else source.items()
        place = {item.key: at for at, item in enumerate(items)}
        cached = square_images(self.images, np.asarray(ids, dtype=np.int64), self.size)
        for sample, image in zip(ids, cached, strict=True):
            at, original = place.get(samples.keys[sample]), image
            if source is not None and at is not None:
                sides = int(samples.heights[sample]), int(samples.widths[sample])
                height, width = (max(1, round(x * self.size / max(*sides, 1))) for x in sides)
                with suppress(RefusedError, KinfolkError, OSError):
                    original = decode(source.load(at), height, width, _PIXEL_CAP).pixels
            square = ImageOps.pad(Image.fromarray(original), (self.size, self.size))
            squares.append(np.asarray(square))
        return squares


def write_audit_page(
    audit: Audit,
    path: Path,
    images: ImageData | Thumbnails | None = None,
    origin: Provenance = UNKNOWN,
) -> None:
    """Without `images` the gallery shows keys or texts."""
    from kinfolk.report.maps import sprite_sheet

    ids, shown = gallery(audit)
    sheet = None
    if images is not None:
        thumbnails = images if isinstance(images, Thumbnails) else Thumbnails(images)
        sheet = sprite_sheet(thumbnails.squares(ids), thumbnails.size)
    shown["samples"]["tile"] = None if sheet is None else sheet.layout
    panels, knows_share = panels_of(audit), not math.isnan(audit.kin_share)
    sections = {
        "audit": ("Audit", True),
        "measured": ("Figures", True),
        "gallery": ("Kin", True),
        "groups": ("Duplicates", shown["groups"]),
        "mislabels": ("Label errors", audit.labels is not None),
        "hubs": ("Hubs", shown["hubs"]),
        "batches": ("Batches", knows_share or audit.suggested_alpha is not None),
    }
    present = {id: title for id, (title, contents) in sections.items() if contents}
    write_page(
        path,
        "auditing/audit.html",
        SCRIPTS,
        data={"figures": {panel.id: panel.figure for panel in panels}, "gallery": shown},
        title="Audit",
        sections=list(present.items()),
        sheet=None if sheet is None else sheet.uri,
        lead=lead(audit, origin.encoder),
        verdict=verdict(audit, origin),
        tiles=audit_tiles(audit),
        panels=panels,
        present=present,
        audit=audit,
        num_anchors=len(shown["anchors"]),
        has_labels=audit.labels is not None,
        knows_share=knows_share,
    )


# ---- the samples that are shown


def gallery(audit: Audit) -> tuple[list[int], dict[str, Any]]:
    """Ids of the samples that are shown, and data for the script, which refers to samples by their
    position among these."""
    anchors, kin_of = _choose_anchors(audit), audit.pairs["anchor"]
    first, last = (np.searchsorted(kin_of, anchors, side) for side in ("left", "right"))
    pairs = [audit.pairs[one:end] for one, end in zip(first, last, strict=True)]
    groups = [audit.groups[audit.groups["group"] == group] for group in range(GROUPS)]
    groups = [members for members in groups if len(members)]
    hubs, mislabels = audit.hubs[:HUBS], audit.mislabels[:DOUBTFUL]
    shown = [anchors, *(each["kin"] for each in pairs), hubs["sample"], mislabels["sample"]]
    shown += [each["sample"][:MEMBERS] for each in groups]
    samples = np.unique(np.concatenate(shown)).astype(np.int64)

    def place(ids: Any) -> Any:
        return np.searchsorted(samples, ids).tolist()

    hub_notes = [f"{row['occurrence']} anchors, {row['times_expected']:.1f}×" for row in hubs]
    doubts = [
        f"rather {audit.class_name(int(row['suggested']))}? ({row['probability']:.0%})"
        for row in mislabels
    ]
    cards = [
        {"kind": str(m["kind"][0]), "size": len(m), "samples": place(m["sample"][:MEMBERS])}
        for m in groups
    ]
    return samples.tolist(), {
        "samples": _describe(audit, samples.tolist()),
        "anchors": place(anchors),
        "thresholds": rounded(audit.thresholds[anchors], 4),
        "flagged": audit.flagged[anchors].tolist(),
        "kin": [place(each["kin"]) for each in pairs],
        "similarity": [rounded(each["similarity"], 4) for each in pairs],
        "groups": cards,
        "hubs": list(zip(place(hubs["sample"]), hub_notes, strict=True)),
        "mislabels": list(zip(place(mislabels["sample"]), doubts, strict=True)),
    }


def _choose_anchors(audit: Audit) -> Ints:
    """Random anchors and, with labels, anchors whose closest kin has another label."""
    random = np.random.default_rng(0)
    chosen = random.permutation(np.unique(audit.pairs["anchor"]))[:ANCHORS]
    if audit.labels is not None:
        first = audit.pairs[audit.pairs["rank"] == 1]
        one, other = audit.labels[first["anchor"]], audit.labels[first["kin"]]
        wrong = first[(one >= 0) & (other >= 0) & (one != other)]
        closest = np.argsort(-wrong["similarity"], kind="stable")[:WRONG]
        chosen = np.unique(np.concatenate([chosen, wrong["anchor"][closest]]))
    shuffled: Ints = random.permutation(chosen).astype(np.int64)
    return shuffled


def _describe(audit: Audit, samples: list[int]) -> dict[str, Any]:
    """Has the form that the report uses too."""
    keys, labels, classes = audit.keys, None, []
    if audit.labels is not None:
        present, place = np.unique(audit.labels[samples], return_inverse=True)
        unknown = int((present < 0).sum())
        labels = (place - unknown).tolist()
        classes = [audit.class_name(int(label)) for label in present[unknown:]]
    return {
        "ids": samples,
        "keys": [f"sample {i}" if keys is None else str(keys[i]) for i in samples],
        "named": keys is not None,
        "texts": None if audit.texts is None else [audit.texts[i] for i in samples],
        "labels": labels,
        "classes": classes,
    }


# ---- figures and words


def panels_of(audit: Audit) -> list[Panel]:
    low, middle, high = np.quantile(audit.thresholds, (0.05, 0.5, 0.95))
    threshold = Panel(
        "threshold",
        "Thresholds",
        f"the (1 − α) quantile of each sample, α = {audit.alpha:g}",
        f"Nine of ten lie between {low:.3f} and {high:.3f}, the median is {middle:.3f}",
        figure(
            outlines([("samples", audit.thresholds, "accent", "solid")]), "threshold", share=True
        ),
    )
    points, number = audit.curve.points, audit.curve.num_anchors
    if not points:
        return [threshold]
    which = "all anchors" if number == len(audit) else f"{number:,} anchors drawn at random"
    alphas = [point.alpha for point in points]
    curve = figure(
        [
            line("precision", alphas, [point.precision for point in points], "accent"),
            line("recall", alphas, [point.recall for point in points], "second"),
            line("F1", alphas, [point.f1 for point in points], "third"),
        ],
        "α",
        share=True,
    )
    ticks = {"tickvals": [0.001, 0.01, 0.1, 0.3], "tickformat": "~g"}
    curve["layout"]["xaxis"] |= {"type": "log", **ticks}
    highest = audit.curve.best_alpha(precision=0)
    best = f"F1 is highest at α = {highest:g}" if highest else "No F1"
    note = f"flagged pairs against the labels, {which}"
    return [Panel("curve", "Along α", note, best, curve), threshold]


def lead(audit: Audit, encoder: str | None = None) -> str:
    text = "" if encoder is None else f"Features by {encoder}. "
    text += (
        f"Each of {len(audit):,} samples was compared with all others. Similarities above the"
        f" {1 - audit.alpha:.4g} quantile are flagged as kin (likely false negatives)."
    )
    if not audit.flagged.any() and audit.alpha * (len(audit) - 1) < 1:
        text += (
            f" That is less than one of {len(audit) - 1:,} samples, so nothing is flagged; a larger"
            " alpha flags more."
        )
    return text


def audit_tiles(audit: Audit) -> list[tuple[str, str, str]]:
    """Label, value and note of the tiles."""
    flagged, (alpha, why) = int(audit.flagged.sum()), suggest_alpha(audit)
    number = f"{flagged / 1e6:.3g} M" if flagged >= 1_000_000 else f"{flagged:,}"
    found = [
        ("Samples", f"{len(audit):,}", ""),
        ("Flagged pairs", number, f"α = {audit.alpha:g}; {len(audit.pairs):,} listed"),
        ("Suggested α", "none" if alpha is None else f"{alpha:g}", why),
    ]
    if not math.isnan(audit.f1):
        precision = "—" if math.isnan(audit.precision) else f"{audit.precision:.1%}"
        found.append(("Precision", precision, f"recall {audit.recall:.1%}, F1 {audit.f1:.3f}"))
        found.append(("Equal labels", f"{audit.kin_share:.1%}", "share of all pairs"))
    near = f"and {audit.num_groups('near-duplicate'):,} near-duplicate groups"
    found.append(("Duplicates", f"{audit.num_groups('duplicate'):,}", near))
    found.append(("Hubs", f"{len(audit.hubs):,}", "samples that very many anchors flag"))
    if len(audit.mislabels):
        found.append(("Label errors", f"{len(audit.mislabels):,}", "likely"))
    return found
