"""Thumbnails of samples for the page of an audit, decoded from the original images.

The samples that the page of an audit shows: anchors with their kin, groups, hubs, doubtful labels
and outliers.

Dimension key: N data set, P listed pairs.

audit.html: the page of an audit, one file that needs nothing else.

Figures are plain dictionaries for plotly.js with named colours, as in the report. All text from the
data is escaped by the template or set as text by the script.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from kinfolk.auditing.inputs import Ints
from kinfolk.auditing.verdict import UNKNOWN, Provenance, alpha_to_try, verdict
from kinfolk.errors import KinfolkError
from kinfolk.report import html
from kinfolk.report.html import Panel, figure, histogram, line
from kinfolk.seeding import generator

if TYPE_CHECKING:
    from kinfolk.auditing.result import Audit
    from kinfolk.data.images import ImageData
    from kinfolk.data.source import Source
    from kinfolk.report.maps import Sprites


TILE = 160
_PIXEL_CAP = 500_000_000


class Thumbnails:
    """Square thumbnails of single samples.

    Args:
        images: the samples; their cached pixels are used where an original can't be read.
        source: where the originals are; None uses the cached pixels.
        size: largest side of a thumbnail; small images keep their size.
    """

    def __init__(self, images: ImageData, source: Source | None = None, size: int = TILE) -> None:
        self.images, self.source = images, source
        longest = int(
            max(images.samples.widths.max(initial=1), images.samples.heights.max(initial=1))
        )
        self.size = min(size, longest if source is not None else max(images.height, images.width))

    def squares(self, ids: list[int]) -> list[NDArray[np.uint8]]:
        """(size, size, 3) for each of `ids`: the whole image on a black square."""
        from kinfolk.report.maps import square_images

        place = (
            {}
            if self.source is None
            else {item.key: at for at, item in enumerate(self.source.items())}
        )
        squares = []
        for sample in ids:
            original = self._original(sample, place)
            if original is None:
                (original,) = square_images(
                    self.images, np.asarray([sample], dtype=np.int64), self.size
                )
            height, width = original.shape[:2]
            square = np.zeros((max(self.size, height, width),) * 2 + (3,), dtype=np.uint8)
            top, left = (len(square) - height) // 2, (len(square) - width) // 2
            square[top : top + height, left : left + width] = original
            squares.append(square)
        return squares

    def _original(self, sample: int, place: dict[str, int]) -> NDArray[np.uint8] | None:
        from kinfolk.data.decode import RefusedError, decode

        samples = self.images.samples
        at = place.get(samples.keys[sample])
        if at is None or self.source is None:
            return None
        width, height = int(samples.widths[sample]), int(samples.heights[sample])
        scale = self.size / max(width, height, 1)
        try:
            found = decode(
                self.source.load(at),
                max(1, round(height * scale)),
                max(1, round(width * scale)),
                _PIXEL_CAP,
            )
        except (RefusedError, KinfolkError, OSError):
            return None
        return found.pixels


ANCHORS, WRONG, HUBS, GROUPS, MEMBERS, DOUBTFUL = 60, 20, 12, 24, 8, 24


def gallery(audit: Audit) -> tuple[list[int], dict[str, Any]]:
    """Ids of the samples that are shown, and data for the page's script, which refers to samples by
    their position among these."""
    anchors = _anchors(audit)
    starts = np.searchsorted(audit.pairs["anchor"], anchors)
    stops = np.searchsorted(audit.pairs["anchor"], anchors, side="right")
    rows = [audit.pairs[start:stop] for start, stop in zip(starts, stops, strict=True)]
    groups = []
    for group in np.unique(audit.groups["group"])[:GROUPS]:
        members = audit.groups[audit.groups["group"] == group]
        groups.append(
            {
                "kind": str(members["kind"][0]),
                "size": len(members),
                "samples": members["sample"][:MEMBERS].tolist(),
            }
        )
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
        "similarity": [
            [round(float(similarity), 4) for similarity in row["similarity"]] for row in rows
        ],
        "groups": [
            {**group, "samples": [place[sample] for sample in group["samples"]]} for group in groups
        ],
        "hubs": [
            [
                place[int(hub["sample"])],
                int(hub["occurrence"]),
                round(float(hub["times_expected"]), 1),
            ]
            for hub in hubs
        ],
        "mislabels": [[place[int(row["sample"])], _doubt(audit, row)] for row in mislabels],
        "outliers": [
            [place[int(row["sample"])], f"similarity {row['similarity']:.2f}"] for row in outliers
        ],
    }


def sprites(ids: list[int], images: ImageData | Thumbnails | None) -> Sprites | None:
    """The images of the samples in one sheet, in their order."""
    if images is None:
        return None
    from kinfolk.report.maps import sprite_sheet

    thumbnails = images if isinstance(images, Thumbnails) else Thumbnails(images)
    return sprite_sheet(thumbnails.squares(ids), thumbnails.size)


def _doubt(audit: Audit, row: Any) -> str:
    name, probability = audit.class_name(int(row["suggested"])), float(row["probability"])
    return f"rather {name}? ({probability:.0%})"


def _anchors(audit: Audit) -> Ints:
    """Random anchors and, with labels, anchors whose closest kin has another label; in random
    order."""
    draw = generator(0, "gallery")
    with_kin = np.unique(audit.pairs["anchor"])
    chosen = with_kin[torch.randperm(len(with_kin), generator=draw)[:ANCHORS].numpy()]
    if audit.labels is not None:
        first = audit.pairs[audit.pairs["rank"] == 1]
        one, other = audit.labels[first["anchor"]], audit.labels[first["kin"]]
        wrong = first[(one >= 0) & (other >= 0) & (one != other)]
        chosen = np.concatenate(
            [chosen, wrong["anchor"][np.argsort(-wrong["similarity"], kind="stable")][:WRONG]]
        )
    chosen = np.unique(chosen)
    shuffled: Ints = chosen[torch.randperm(len(chosen), generator=draw).numpy()].astype(np.int64)
    return shuffled


def _described(audit: Audit, samples: list[int]) -> dict[str, Any]:
    """Keys, texts and labels, in the form that the report uses too."""
    keys = [
        f"sample {sample}" if audit.keys is None else str(audit.keys[sample]) for sample in samples
    ]
    texts = None if audit.texts is None else [audit.texts[sample] for sample in samples]
    described = {
        "ids": samples,
        "keys": keys,
        "named": audit.keys is not None,
        "texts": texts,
        "labels": None,
        "classes": [],
    }
    if audit.labels is None:
        return described
    present, place = np.unique(audit.labels[samples], return_inverse=True)
    unknown = int((present < 0).sum())
    classes = [audit.classes[label] if audit.classes else str(label) for label in present[unknown:]]
    return described | {"labels": (place - unknown).tolist(), "classes": classes}


SHOWN_IF_FOUND = (
    ("groups", "Duplicates"),
    ("mislabels", "Label errors"),
    ("outliers", "Outliers"),
    ("hubs", "Hubs"),
)
"""Sections of the page that are left out when they are empty."""


def panels_of(audit: Audit) -> list[Panel]:
    """Panels of the distributions and, with labels, of precision, recall and F1 along α."""
    survey = audit.survey
    centre = (survey.edges[:-1] + survey.edges[1:]) / 2
    present = np.flatnonzero(survey.density > 1e-6)
    seen = slice(max(0, present[0] - 1), present[-1] + 2)
    lines = [line("all pairs", centre[seen], survey.density[seen], "accent")]
    if survey.same_density is not None:
        lines.append(line("equal labels", centre[seen], survey.same_density[seen], "second"))
    which = (
        "all anchors"
        if len(survey.anchors) == len(audit)
        else f"{len(survey.anchors):,} anchors drawn at random"
    )
    low, middle, high = np.quantile(audit.thresholds, (0.05, 0.5, 0.95))
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
            f"Nine of ten thresholds lie between {low:.3f} and {high:.3f}, the median is"
            f" {middle:.3f}",
            figure([histogram("samples", audit.thresholds, "accent")], "threshold"),
        ),
        Panel(
            "occurrence",
            "How often a sample is flagged",
            "number of anchors that flag it; hubs are at the far right",
            f"Mean {audit.occurrence.mean():.1f}, at most {audit.occurrence.max()}",
            figure([histogram("samples", audit.occurrence, "third")], "anchors"),
        ),
    ]
    one = [point for point in survey.curve if point.rule == "one α"]
    if one:
        own = [point for point in survey.curve if point.rule == "α by sample"]
        alphas = [point.alpha for point in one]
        traces = [
            line("precision", alphas, [p.precision for p in one], "accent"),
            line("recall", alphas, [p.recall for p in one], "second"),
            line("F1", alphas, [p.f1 for p in one], "third"),
            line(
                "F1, α by sample", [p.alpha for p in own], [p.f1 for p in own], "third", dash="dot"
            ),
        ]
        along = figure(traces, "α", share=True)
        along["layout"]["xaxis"] |= {
            "type": "log",
            "tickvals": [0.001, 0.01, 0.1, 0.3],
            "tickformat": "~g",
        }
        best = max(one, key=lambda point: point.f1)
        panels.insert(
            0,
            Panel(
                "curve",
                "Along α",
                f"flagged pairs against the labels, {which}",
                f"F1 is highest at α = {best.alpha:g}",
                along,
            ),
        )
    return panels


def write_page(
    audit: Audit,
    path: Path,
    images: ImageData | Thumbnails | None = None,
    origin: Provenance = UNKNOWN,
) -> None:
    """Writes the page; without `images` the gallery shows keys or texts. See `Audit.save` for the
    arguments."""
    ids, shown = gallery(audit)
    sheet = sprites(ids, images)
    shown["samples"]["tile"] = None if sheet is None else sheet.layout
    panels = panels_of(audit)
    sections = [("audit", "Audit"), ("measured", "Figures"), ("gallery", "Kin")]
    found = {id: bool(shown[id]) for id, _ in SHOWN_IF_FOUND}
    found["mislabels"] = audit.labels is not None
    basis = _basis(audit)
    sections += [(id, title) for id, title in SHOWN_IF_FOUND if found[id]]
    page = html.compose(
        ("kinfolk.auditing", "audit.html"),
        [
            ("kinfolk.auditing", "audit_marks.js"),
            (html.HERE, "gallery.js"),
            ("kinfolk.auditing", "audit.js"),
        ],
        data={"figures": {panel.id: panel.figure for panel in panels}, "gallery": shown},
        title="Audit",
        sections=[*sections, *([("batches", "Batches")] if basis else [])],
        sheet=None if sheet is None else sheet.uri,
        lead=lead(audit, origin.encoder),
        verdict=verdict(audit, origin),
        tiles=tiles(audit),
        panels=panels,
        batches=audit.batches,
        batch_basis=basis,
        found=found,
        groups_intro=_groups_intro(audit),
        label_words=audit.label_check.words,
        num_mislabels=len(audit.mislabels),
        num_outliers=len(audit.outliers),
        has_labels=audit.labels is not None,
        intro=_intro(audit, len(shown["anchors"])),
    )
    html.write_page(path, page)


def lead(audit: Audit, encoder: str | None = None) -> str:
    """Sentences about what was computed."""
    if encoder is not None:
        return f"Features by {encoder}. {lead(audit)}"
    kept = (
        f" Similarities above the {1 - audit.alpha:.4g} quantile are flagged as kin (likely false"
        " negatives)."
    )
    if not audit.flagged.any() and audit.alpha * (len(audit) - 1) < 1:
        kept += (
            f" That is less than one of {len(audit) - 1:,} samples, so nothing is flagged; a larger"
            " alpha flags more."
        )
    if audit.check is None:
        return f"Each of {len(audit):,} samples was compared with all others.{kept}"
    check = audit.check
    return (
        f"Each of {len(audit):,} samples was compared with the others approximately.{kept} Compared"
        f" with the exact values of {check.anchors} anchors, the search found {check.recall:.1%} of"
        " the nearest neighbours, and the mean error of the thresholds is"
        f" {check.threshold_error:.4f}."
    )


def tiles(audit: Audit) -> list[tuple[str, str, str]]:
    """Label, value and note of the tiles at the top."""
    found = [
        ("Samples", f"{len(audit):,}", ""),
        (
            "Flagged pairs",
            _short(int(audit.flagged.sum())),
            f"α = {audit.alpha:g}; {len(audit.pairs):,} listed",
        ),
        _alpha_tile(audit),
    ]
    if not math.isnan(audit.f1):
        found.append(
            (
                "Precision",
                "—" if math.isnan(audit.precision) else f"{audit.precision:.1%}",
                f"recall {audit.recall:.1%}, F1 {audit.f1:.3f}",
            )
        )
        found.append(("Equal labels", f"{audit.kin_share:.1%}", "share of all pairs"))
    found.append(
        (
            "Duplicates",
            f"{audit.num_groups('duplicate'):,}",
            f"and {audit.num_groups('near-duplicate'):,} near-duplicate groups",
        )
    )
    found.append(("Hubs", f"{len(audit.hubs):,}", "samples that very many anchors flag"))
    if len(audit.mislabels):
        found.append(("Label errors", f"{len(audit.mislabels):,}", "likely"))
    if len(audit.outliers):
        found.append(("Outliers", f"{len(audit.outliers):,}", "far from all other samples"))
    return found


def _alpha_tile(audit: Audit) -> tuple[str, str, str]:
    alpha = alpha_to_try(audit)
    basis = "highest F1" if audit.best_alpha is not None else "share of pairs that stands out"
    return (
        ("Suggested α", "none", "no pairs stand out clearly")
        if alpha is None
        else ("Suggested α", f"{alpha:g}", basis)
    )


def _intro(audit: Audit, num_anchors: int) -> str:
    drawn = "drawn at random"
    mark = ""
    if audit.labels is not None:
        drawn = "some drawn at random and some whose closest kin has another label"
        mark = " ✓ marks kin with the anchor's label, ✗ kin with another label."
    return (
        f"{num_anchors} anchors, {drawn}, each with the samples flagged as its kin, the closest"
        f" first.{mark}"
    )


def _groups_intro(audit: Audit) -> str:
    text = "The largest groups. Duplicates have exactly the same features. "
    if audit.verified:
        return (
            text + "Near-duplicates are the same image up to size, compression, a slight crop or"
            " mirroring, verified by their pixels."
        )
    return (
        text
        + "Near-duplicates are much closer than neighbours usually are; without the images they"
        " were not verified by pixels."
    )


def _basis(audit: Audit) -> str:
    """What the table of batches goes by; empty if there is nothing to show."""
    views = "two views of each sample" if audit.views == 2 else "one candidate of each sample"
    if not math.isnan(audit.kin_share):
        equal = f"according to the labels, which are equal in {audit.kin_share:.2%} of all pairs"
        return f"False negatives with {views}, {equal}."
    if audit.suggested_alpha is None:
        return ""
    share = f"at least {audit.outstanding.share:.2%} of all pairs"
    return (
        f"Negatives that stand out, {share}, with {views}. Without labels it is unknown how many"
        " are false."
    )


def _short(number: int) -> str:
    return f"{number / 1e6:.3g} M" if number >= 1_000_000 else f"{number:,}"
