"""audit.html: the page of an audit, one file that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kinfolk.auditing.survey import best_alpha
from kinfolk.auditing.verdict import UNKNOWN, Provenance, alpha_to_try, is_limited, verdict
from kinfolk.errors import KinfolkError
from kinfolk.features import Ints
from kinfolk.report.html import HERE as REPORT
from kinfolk.report.html import Panel, compose, figure, histogram, line
from kinfolk.report.html import write_page as write_text_of_page

if TYPE_CHECKING:
    from kinfolk.auditing.run_audit import Audit
    from kinfolk.data.images import ImageData
    from kinfolk.data.source import Source
    from kinfolk.report.maps import Sprites

HERE = "kinfolk.auditing"
SCRIPTS = ((HERE, "audit_marks.js"), (REPORT, "gallery.js"), (HERE, "audit.js"))
TILE = 160
_PIXEL_CAP = 500_000_000
ANCHORS, WRONG, HUBS, GROUPS, MEMBERS, DOUBTFUL = 60, 20, 12, 24, 8, 24
"""How many samples, groups and members of a group the page shows."""
SHOWN_IF_FOUND = {
    "groups": "Duplicates",
    "mislabels": "Label errors",
    "outliers": "Outliers",
    "hubs": "Hubs",
}
"""Sections that are left out when they are empty."""


class Thumbnails:
    """Square thumbnails of single samples, from the originals in `source` where they can be
    read."""

    def __init__(self, images: ImageData, source: Source | None = None) -> None:
        self.images, self.source = images, source
        sizes = (images.samples.widths, images.samples.heights)
        longest = max(int(size.max(initial=1)) for size in sizes)
        cached = max(images.height, images.width)
        self.size = min(TILE, cached if source is None else longest)

    def squares(self, ids: list[int]) -> list[NDArray[np.uint8]]:
        """(size, size, 3) for each of `ids`: the whole image on a black square."""
        from kinfolk.report.maps import square_images

        items = () if self.source is None else self.source.items()
        place = {item.key: at for at, item in enumerate(items)}
        squares = []
        for sample in ids:
            original = self._original(sample, place)
            if original is None:
                (original,) = square_images(self.images, np.asarray([sample]), self.size)
            height, width = original.shape[:2]
            side = max(self.size, height, width)
            square = np.zeros((side, side, 3), dtype=np.uint8)
            top, left = (side - height) // 2, (side - width) // 2
            square[top : top + height, left : left + width] = original
            squares.append(square)
        return squares

    def _original(self, sample: int, place: dict[str, int]) -> NDArray[np.uint8] | None:
        from kinfolk.data.decode import RefusedError, decode

        samples = self.images.samples
        at = place.get(samples.keys[sample])
        if at is None or self.source is None:
            return None
        sides = int(samples.heights[sample]), int(samples.widths[sample])
        height, width = (max(1, round(side * self.size / max(*sides, 1))) for side in sides)
        try:
            return decode(self.source.load(at), height, width, _PIXEL_CAP).pixels
        except (RefusedError, KinfolkError, OSError):
            return None


def write_page(
    audit: Audit,
    path: Path,
    images: ImageData | Thumbnails | None = None,
    origin: Provenance = UNKNOWN,
) -> None:
    """Writes the page; without `images` the gallery shows keys or texts."""
    ids, shown = gallery(audit)
    sheet = sprites(ids, images)
    shown["samples"]["tile"] = None if sheet is None else sheet.layout
    panels, basis = panels_of(audit), _basis(audit)
    found = {id: bool(shown[id]) for id in SHOWN_IF_FOUND}
    found["mislabels"] = audit.labels is not None
    sections = [("audit", "Audit"), ("measured", "Figures"), ("gallery", "Kin")]
    sections += [(id, title) for id, title in SHOWN_IF_FOUND.items() if found[id]]
    sections += [("batches", "Batches")] if basis else []
    page = compose(
        (HERE, "audit.html"),
        SCRIPTS,
        data={"figures": {panel.id: panel.figure for panel in panels}, "gallery": shown},
        title="Audit",
        sections=sections,
        sheet=None if sheet is None else sheet.uri,
        lead=lead(audit, origin.encoder),
        verdict=verdict(audit, origin),
        tiles=tiles(audit),
        panels=panels,
        batches=audit.batches,
        batch_basis=basis,
        found=found,
        verified=audit.verified,
        label_words=audit.label_check.description,
        num_mislabels=len(audit.mislabels),
        num_outliers=len(audit.outliers),
        num_anchors=len(shown["anchors"]),
        has_labels=audit.labels is not None,
    )
    write_text_of_page(path, page)


# ---- the samples that are shown


def gallery(audit: Audit) -> tuple[list[int], dict[str, Any]]:
    """Ids of the samples that are shown, and data for the page's script, which refers to samples by
    their position among these."""
    anchors = _choose_anchors(audit)
    start, stop = (
        np.searchsorted(audit.pairs["anchor"], anchors, side) for side in ("left", "right")
    )
    pairs = [audit.pairs[slice(*ends)] for ends in zip(start, stop, strict=True)]
    groups = [audit.groups[audit.groups["group"] == group] for group in range(GROUPS)]
    groups = [members for members in groups if len(members)]
    hubs, mislabels, outliers = audit.hubs[:HUBS], audit.mislabels[:DOUBTFUL], audit.outliers[:HUBS]
    shown = [anchors, *(each["kin"] for each in pairs)]
    shown += [each["sample"][:MEMBERS] for each in groups]
    shown += [table["sample"] for table in (hubs, mislabels, outliers)]
    samples = np.unique(np.concatenate(shown)).astype(np.int64)

    def place(ids: Any) -> list[int]:
        found: list[int] = np.searchsorted(samples, ids).tolist()
        return found

    def with_note(table: NDArray[Any], note: Callable[[Any], str]) -> list[list[Any]]:
        pairs = zip(place(table["sample"]), table, strict=True)
        return [[at, note(row)] for at, row in pairs]

    def doubt(row: Any) -> str:
        return f"rather {audit.class_name(int(row['suggested']))}? ({row['probability']:.0%})"

    return samples.tolist(), {
        "samples": _describe(audit, samples.tolist()),
        "anchors": place(anchors),
        "thresholds": _rounded(audit.thresholds[anchors]),
        "flagged": audit.flagged[anchors].tolist(),
        "kin": [place(each["kin"]) for each in pairs],
        "similarity": [_rounded(each["similarity"]) for each in pairs],
        "groups": [
            {
                "kind": str(members["kind"][0]),
                "size": len(members),
                "samples": place(members["sample"][:MEMBERS]),
            }
            for members in groups
        ],
        "hubs": with_note(
            hubs, lambda row: f"{row['occurrence']} anchors, {row['times_expected']:.1f}×"
        ),
        "mislabels": with_note(mislabels, doubt),
        "outliers": with_note(outliers, lambda row: f"similarity {row['similarity']:.2f}"),
    }


def sprites(ids: list[int], images: ImageData | Thumbnails | None) -> Sprites | None:
    if images is None:
        return None
    from kinfolk.report.maps import sprite_sheet

    thumbnails = images if isinstance(images, Thumbnails) else Thumbnails(images)
    return sprite_sheet(thumbnails.squares(ids), thumbnails.size)


def _rounded(values: Any) -> list[float]:
    return [round(float(value), 4) for value in values]


def _choose_anchors(audit: Audit) -> Ints:
    """Random anchors and, with labels, anchors whose closest kin has another label; in random
    order."""
    random = np.random.default_rng(0)
    with_kin = np.unique(audit.pairs["anchor"])
    chosen = random.permutation(with_kin)[:ANCHORS]
    if audit.labels is not None:
        first = audit.pairs[audit.pairs["rank"] == 1]
        one, other = audit.labels[first["anchor"]], audit.labels[first["kin"]]
        wrong = first[(one >= 0) & (other >= 0) & (one != other)]
        closest = np.argsort(-wrong["similarity"], kind="stable")[:WRONG]
        chosen = np.unique(np.concatenate([chosen, wrong["anchor"][closest]]))
    shuffled: Ints = random.permutation(chosen).astype(np.int64)
    return shuffled


def _describe(audit: Audit, samples: list[int]) -> dict[str, Any]:
    """Keys, texts and labels, in the form that the report uses too."""
    described: dict[str, Any] = {
        "ids": samples,
        "keys": [str(audit.keys[i]) if audit.keys is not None else f"sample {i}" for i in samples],
        "named": audit.keys is not None,
        "texts": None if audit.texts is None else [audit.texts[i] for i in samples],
        "labels": None,
        "classes": [],
    }
    if audit.labels is not None:
        present, place = np.unique(audit.labels[samples], return_inverse=True)
        unknown = int((present < 0).sum())
        described["labels"] = (place - unknown).tolist()
        described["classes"] = [audit.class_name(int(label)) for label in present[unknown:]]
    return described


# ---- figures and words


def panels_of(audit: Audit) -> list[Panel]:
    survey = audit.survey
    which = "all anchors"
    if len(survey.anchors) < len(audit):
        which = f"{len(survey.anchors):,} anchors drawn at random"
    centre = (survey.edges[:-1] + survey.edges[1:]) / 2
    present = np.flatnonzero(survey.density > 1e-6)
    part = slice(max(0, present[0] - 1), present[-1] + 2)
    lines = [line("all pairs", centre[part], survey.density[part], "accent")]
    if survey.same_density is not None:
        lines.append(line("equal labels", centre[part], survey.same_density[part], "second"))
    low, middle, high = np.quantile(audit.thresholds, (0.05, 0.5, 0.95))
    thresholds = histogram("samples", audit.thresholds, "accent")
    occurrence = histogram("samples", audit.occurrence, "third")
    panels = [
        Panel(
            "similarity",
            "Similarities",
            f"share of pairs, {which}",
            "Histogram of the similarities of pairs",
            figure(lines, "similarity"),
        ),
        Panel(
            "threshold",
            "Thresholds",
            f"the (1 − α) quantile of each sample, α = {audit.alpha:g}",
            f"Nine of ten lie between {low:.3f} and {high:.3f}, the median is {middle:.3f}",
            figure([thresholds], "threshold"),
        ),
        Panel(
            "occurrence",
            "How often a sample is flagged",
            "number of anchors that flag it; hubs are at the far right",
            f"Mean {audit.occurrence.mean():.1f}, at most {audit.occurrence.max()}",
            figure([occurrence], "anchors"),
        ),
    ]
    if not survey.curve:
        return panels
    alphas = [point.alpha for point in survey.curve]
    scores = {"precision": "accent", "recall": "second", "f1": "third"}
    traces = [
        line(name.replace("f1", "F1"), alphas, [getattr(p, name) for p in survey.curve], colour)
        for name, colour in scores.items()
    ]
    curve = figure(traces, "α", share=True)
    ticks = {"tickvals": [0.001, 0.01, 0.1, 0.3], "tickformat": "~g"}
    curve["layout"]["xaxis"] |= {"type": "log", **ticks}
    highest = best_alpha(audit.survey, precision=0)
    best = f"F1 is highest at α = {highest:g}" if highest else "No F1"
    note = f"flagged pairs against the labels, {which}"
    return [Panel("curve", "Along α", note, best, curve), *panels]


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


def tiles(audit: Audit) -> list[tuple[str, str, str]]:
    """Label, value and note of the tiles at the top."""
    flagged, alpha = int(audit.flagged.sum()), alpha_to_try(audit)
    number = f"{flagged / 1e6:.3g} M" if flagged >= 1_000_000 else f"{flagged:,}"
    if math.isnan(audit.kin_share):
        note = "no pairs stand out clearly" if alpha is None else "share of pairs that stands out"
    elif alpha is None:
        note = "most flags are wrong at every α"
    else:
        note = "half of the flags or more are right" if is_limited(audit) else "highest F1"
    suggested = ("Suggested α", "none" if alpha is None else f"{alpha:g}", note)
    found = [
        ("Samples", f"{len(audit):,}", ""),
        ("Flagged pairs", number, f"α = {audit.alpha:g}; {len(audit.pairs):,} listed"),
        suggested,
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
    if len(audit.outliers):
        found.append(("Outliers", f"{len(audit.outliers):,}", "far from all other samples"))
    return found


def _basis(audit: Audit) -> str:
    """What the table of batches goes by; empty if there is nothing to show."""
    views = "two views of each sample" if audit.views == 2 else "one candidate of each sample"
    if not math.isnan(audit.kin_share):
        return (
            f"False negatives with {views}, according to the labels, which are equal in"
            f" {audit.kin_share:.2%} of all pairs."
        )
    if audit.suggested_alpha is None:
        return ""
    return (
        f"Negatives that stand out, at least {audit.outstanding.share:.2%} of all pairs, with"
        f" {views}. Without labels it is unknown how many are false."
    )
