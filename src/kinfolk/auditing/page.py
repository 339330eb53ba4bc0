"""audit.html: the page of an audit, one file that needs nothing else.

Figures are plain dictionaries for plotly.js with named colours, as in the report. All text from the data is escaped by the template or set
as text by the script.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kinfolk.auditing.gallery import gallery, sprites
from kinfolk.auditing.verdict import verdict
from kinfolk.report import html
from kinfolk.report.curves import Panel, figure, histogram, line

if TYPE_CHECKING:
    from kinfolk.auditing.result import Audit
    from kinfolk.auditing.thumbnails import Thumbnails
    from kinfolk.data.images import ImageData

SHOWN_IF_FOUND = (("groups", "Duplicates"), ("mislabels", "Label errors"), ("outliers", "Outliers"), ("hubs", "Hubs"))
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
    which = "all anchors" if len(survey.anchors) == len(audit) else f"{len(survey.anchors):,} anchors drawn at random"
    low, middle, high = np.quantile(audit.thresholds, (0.05, 0.5, 0.95))
    panels = [
        Panel(
            "similarity", "Similarities", f"share of pairs, {which}", "Histogram of the similarities of pairs", figure(lines, "similarity")
        ),
        Panel(
            "threshold",
            "Thresholds",
            f"the (1 − α) quantile of each sample, α = {audit.alpha:g}",
            f"Nine of ten thresholds lie between {low:.3f} and {high:.3f}, the median is {middle:.3f}",
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
            line("F1, own α", [p.alpha for p in own], [p.f1 for p in own], "third", dash="dot"),
        ]
        along = figure(traces, "α", share=True)
        along["layout"]["xaxis"] |= {"type": "log", "tickvals": [0.001, 0.01, 0.1, 0.3], "tickformat": "~g"}
        best = max(one, key=lambda point: point.f1)
        panels.insert(
            0, Panel("curve", "Along α", f"flagged pairs against the labels, {which}", f"F1 is highest at α = {best.alpha:g}", along)
        )
    return panels


def write_page(
    audit: Audit,
    path: Path,
    images: ImageData | Thumbnails | None = None,
    *,
    out: Path | str = "audit",
    data: str | None = None,
    encoder: str | None = None,
) -> None:
    """Writes the page; without `images` the gallery shows keys or texts. See `Audit.save` for the other arguments."""
    ids, shown = gallery(audit)
    sheet = sprites(ids, images)
    shown["samples"]["tile"] = None if sheet is None else sheet.layout
    panels = panels_of(audit)
    sections = [("audit", "Audit"), ("measured", "Figures"), ("gallery", "Kin")]
    sections += [(id, title) for id, title in SHOWN_IF_FOUND if shown[id]]
    page = html.compose(
        ("kinfolk.auditing", "audit.html"),
        [(html.HERE, "gallery.js"), ("kinfolk.auditing", "audit.js")],
        data={"figures": {panel.id: panel.figure for panel in panels}, "gallery": shown},
        title="Audit",
        sections=[*sections, ("batches", "Batches")],
        sheet=None if sheet is None else sheet.uri,
        lead=lead(audit, encoder),
        verdict=verdict(audit, out=out, data=data),
        tiles=tiles(audit),
        panels=panels,
        batches=audit.batches,
        batch_basis=_basis(audit),
        found={id: bool(shown[id]) for id, _ in SHOWN_IF_FOUND},
        groups_intro=_groups_intro(audit),
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
    kept = f" Similarities above the {1 - audit.alpha:.4g} quantile are flagged as kin (likely false negatives)."
    if not audit.flagged.any() and audit.alpha * (len(audit) - 1) < 1:
        kept += f" That is less than one of {len(audit) - 1:,} samples, so nothing is flagged; a larger alpha flags more."
    if audit.check is None:
        return f"Each of {len(audit):,} samples was compared with all others.{kept}"
    check = audit.check
    return (
        f"Each of {len(audit):,} samples was compared with the others approximately.{kept} Compared with the exact values of "
        f"{check.anchors} anchors, the search found {check.recall:.1%} of the nearest neighbours, and the mean error of the thresholds is "
        f"{check.threshold_error:.4f}."
    )


def tiles(audit: Audit) -> list[tuple[str, str, str]]:
    """Label, value and note of the tiles at the top."""
    found = [
        ("Samples", f"{len(audit):,}", ""),
        ("Flagged pairs", _short(int(audit.flagged.sum())), f"α = {audit.alpha:g}; {len(audit.pairs):,} listed"),
        ("Suggested α", f"{audit.suggested_alpha:g}", "share of pairs that stands out"),
    ]
    if not math.isnan(audit.f1):
        found.append(
            ("Precision", "—" if math.isnan(audit.precision) else f"{audit.precision:.1%}", f"recall {audit.recall:.1%}, F1 {audit.f1:.3f}")
        )
        found.append(("Equal labels", f"{audit.kin_share:.1%}", "share of all pairs"))
    found.append(("Duplicates", f"{audit.num_groups('duplicate'):,}", f"and {audit.num_groups('near-duplicate'):,} near-duplicate groups"))
    found.append(("Hubs", f"{len(audit.hubs):,}", "samples that very many anchors flag"))
    if len(audit.mislabels):
        found.append(("Label errors", f"{len(audit.mislabels):,}", "likely, by the nearest neighbours"))
    if len(audit.outliers):
        found.append(("Outliers", f"{len(audit.outliers):,}", "far from all other samples"))
    return found


def _intro(audit: Audit, num_anchors: int) -> str:
    drawn = "drawn at random"
    mark = ""
    if audit.labels is not None:
        drawn = "some drawn at random and some whose closest kin has another label"
        mark = " ✓ marks kin with the anchor's label, ✗ kin with another label."
    return f"{num_anchors} anchors, {drawn}, each with the samples flagged as its kin, the closest first.{mark}"


def _groups_intro(audit: Audit) -> str:
    text = "The largest groups. Duplicates have exactly the same features. "
    if audit.verified:
        return text + "Near-duplicates are the same image up to size, compression or a slight crop, verified by their pixels."
    return text + "Near-duplicates are much closer than neighbours usually are; without the images they were not verified by pixels."


def _basis(audit: Audit) -> str:
    if math.isnan(audit.kin_share):
        return f"assuming that the suggested share of {audit.suggested_alpha:g} of all pairs are false negatives"
    return f"according to the labels, which are equal in {audit.kin_share:.2%} of all pairs"


def _short(number: int) -> str:
    return f"{number / 1e6:.3g} M" if number >= 1_000_000 else f"{number:,}"
