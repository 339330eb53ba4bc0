"""What an audit means for a training that uses the audited features as a guide (`+guide`)."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinfolk.auditing.verdict import ATTRACT, ELIMINATE, estimated_precision

if TYPE_CHECKING:
    from kinfolk.auditing.result import Audit


def guide_advice(audit: Audit, features: Any = None, data: str | None = None) -> tuple[str, str]:
    """A sentence about the features as a guide for training, and the command to run.

    Args:
        features: the audited file of features or run folder, for the command; anything else is written as FEATURES.
        data: where the samples come from, for the command.
    """
    source = "DATA" if data is None else shlex.quote(data)
    share = audit.suggested_alpha if math.isnan(audit.kin_share) else audit.kin_share
    alpha, precision = _best(audit)
    how = "measured with the labels" if not math.isnan(audit.precision) else "estimated without labels"
    right = f"of the nearest {alpha:.2g} of the samples about {precision:.0%} are right ({how})"
    if precision < ELIMINATE:
        sentence = f"As a guide for training: too weak, {right}. A prior needs no guide: the share of false negatives is {share:.2g}."
        return sentence, f"kinfolk train --data {source} --out runs/debiased --method simclr --set framework.prior={share:.2g}"
    guide = shlex.quote(str(features)) if isinstance(features, str | Path) and Path(features).exists() else "FEATURES"
    action = ":attract" if precision >= ATTRACT else ""
    done = "attract the nearest" if action else "eliminate the nearest, or give all candidates degrees with detector.temperature"
    command = (
        f"kinfolk train --data {source} --out runs/guided --method simclr+guide{action} --guide {guide} --set detector.alpha={alpha:.2g}"
    )
    return f"As a guide for training: {right}; {done}.", command


def _best(audit: Audit) -> tuple[float, float]:
    """The largest share of nearest samples that is mostly right, up to the share of false negatives, and its precision; where none is, the
    audited share."""
    limit = max(audit.suggested_alpha if math.isnan(audit.kin_share) else audit.kin_share, audit.alpha)
    points = [point for point in audit.survey.curve if point.rule == "one α" and math.isfinite(point.precision) and point.alpha <= limit]
    good = [(point.alpha, point.precision) for point in points if point.precision >= ELIMINATE]
    if good:
        return max(good)
    precision = audit.precision if math.isfinite(audit.precision) else estimated_precision(audit.alpha, audit.survey.level)
    return audit.alpha, precision
