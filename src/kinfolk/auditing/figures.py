"""The figures of the audit's page, in the form of the report's: plain dictionaries, colours by name.

Dimension key: N data set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kinfolk.report.plots import Panel, figure, histogram, line

if TYPE_CHECKING:
    from kinfolk.auditing.result import Audit


def panels_of(audit: Audit) -> list[Panel]:
    """The distributions and, with labels, precision, recall and F1 along α."""
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
            "How often a sample is kin",
            "number of anchors that flag it; far to the right are hubs",
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
