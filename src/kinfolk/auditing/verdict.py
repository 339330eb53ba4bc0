"""The verdict of an audit in plain sentences: how many false negatives there are, which α to use, what to do, and the next command.

The advice depends on the precision of the flagged pairs, by the rule of thumb of docs/guide.md: remove flagged negatives when most flags
are right, attract them only when nearly all are, and train longer or use the pairs of a stronger model when most flags are wrong. Without
labels the precision is estimated from the distribution of the similarities. `guide_advice` rates the features as a guide (`+guide`).
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinfolk.auditing.alpha import batch_lines, kin_shares

if TYPE_CHECKING:
    from kinfolk.auditing.result import Audit

BATCH = 256
FEW, MANY = 0.003, 0.03
"""Shares of false negatives among the negatives: below the first they are few, above the second many."""
REFERENCES = (("ImageNet-1k", 0.001), ("CIFAR-100", 0.01), ("CIFAR-10", 0.1))
"""Share of false negatives in well-known data sets: one over the number of classes."""
ELIMINATE, ATTRACT = 0.5, 0.9
"""Precision from which eliminating, and from which attracting, is advised."""


@dataclass(frozen=True)
class Verdict:
    """The result of an audit in words.

    Args:
        amount: how many false negatives a batch contains, and whether that is few or many.
        alpha: the suggested α with its uncertainty.
        precision: how many flags are right.
        advice: what to do.
        action: "none", "prior", "eliminate" or "attract".
        command: the next command.
    """

    amount: str
    alpha: str
    precision: str
    advice: str
    action: str
    command: str

    @property
    def sentences(self) -> list[str]:
        """All sentences in order."""
        return [self.amount, self.alpha, self.precision, self.advice]


def verdict(audit: Audit, *, out: Path | str = "audit", data: str | None = None) -> Verdict:
    """What the audit means for a training on these samples.

    Args:
        out: folder of the audit, for the command.
        data: where the samples come from, for the command.
    """
    share, precision, measured = _share(audit), *_precision(audit)
    alpha = _alpha(audit)
    action = _action(share, precision)
    return Verdict(
        _amount(audit, share),
        _alpha_sentence(audit),
        _precision_sentence(audit, precision, measured),
        _advice(action, measured),
        action,
        _command(action, alpha, Path(out), data),
    )


def estimated_precision(alpha: float, level: float) -> float:
    """Precision of the flags without labels: the share of flagged pairs in excess of a normal distribution of unrelated pairs.

    Args:
        alpha: share of flagged pairs.
        level: z above which that share lies; see `similarity_spread`.
    """
    unrelated = 0.5 * math.erfc(level / math.sqrt(2))
    return min(1.0, max(0.0, 1 - unrelated / alpha))


def _share(audit: Audit) -> float:
    return audit.suggested_alpha if math.isnan(audit.kin_share) else audit.kin_share


def _alpha(audit: Audit) -> float:
    """The α for a training: the suggested one; with labels the largest α up to it whose flags are mostly right, if there is one."""
    points = [point for point in audit.survey.curve if point.rule == "one α" and math.isfinite(point.precision)]
    good = [point.alpha for point in points if point.precision >= ELIMINATE and point.alpha <= max(audit.suggested_alpha, audit.alpha)]
    return max(good) if good else audit.suggested_alpha


def _precision(audit: Audit) -> tuple[float, bool]:
    """Precision of the audited flags, and whether it was measured with labels."""
    if not math.isnan(audit.precision):
        return audit.precision, True
    return estimated_precision(audit.alpha, audit.survey.level), False


def _action(share: float, precision: float) -> str:
    if share < FEW:
        return "none"
    if precision < ELIMINATE:
        return "prior"
    return "attract" if precision >= ATTRACT else "eliminate"


def _amount(audit: Audit, share: float) -> str:
    (line,) = batch_lines(kin_shares(audit.labels, audit.suggested_alpha), max(len(audit), BATCH), (BATCH,))
    known = not math.isnan(audit.kin_share)
    size = "few" if share < FEW else "many" if share >= MANY else "a moderate number"
    closest = min(REFERENCES, key=lambda each: abs(math.log(max(share, 1e-9) / each[1])))[0]
    basis = "by the labels" if known else "estimated from the similarities, a lower bound"
    others = ", ".join(f"{name} {value:.1%}" for name, value in REFERENCES)
    return (
        f"In a batch of {BATCH} each anchor has {line.per_anchor:.1f} false negatives among {line.negatives} negatives "
        f"({share:.2%}, {basis}). That is {size}, about as in {closest} (share of false negatives: {others})."
    )


def _alpha_sentence(audit: Audit) -> str:
    low, high = audit.suggested_range
    text = f"Suggested α: {audit.suggested_alpha:g} (95% interval {low:g} to {high:g})."
    if audit.best_alpha is not None:
        text += f" With the labels F1 is highest at α = {audit.best_alpha:g}."
    return text


def _precision_sentence(audit: Audit, precision: float, measured: bool) -> str:
    how = "measured with the labels" if measured else "a rough estimate without labels; check the gallery"
    return f"At α = {audit.alpha:g} about {precision:.0%} of the flagged pairs are right ({how})."


def _advice(action: str, measured: bool) -> str:
    if action == "none":
        return "Advice: train without a detector; there is little to gain from removing so few false negatives."
    if action == "prior":
        return (
            "Advice: do not remove these pairs. Most flags are wrong, so the negatives that training needs would be lost. "
            "Train longer or with a larger encoder first, or use the pairs that a stronger model finds."
        )
    sure = "" if measured else " Look at the gallery first, because the precision is only estimated."
    if action == "attract":
        return f"Advice: eliminate the flagged pairs, and try to attract them, because nearly all flags are right.{sure}"
    return f"Advice: eliminate the flagged pairs from the negatives. Do not attract them, because too many flags are wrong.{sure}"


def _command(action: str, alpha: float, out: Path, data: str | None) -> str:
    source = "DATA" if data is None else shlex.quote(data)
    if action == "none":
        return f"kinfolk train --data {source} --out runs/simclr --method simclr"
    if action == "prior":
        return f"kinfolk audit {source} --encoder timm/resnet50 --out {shlex.quote(str(out) + '-stronger')}"
    return f"kinfolk train --data {source} --out runs/glofnd --method simclr+glofnd --set detector.alpha={alpha:g}"


def guide_advice(audit: Audit, features: Any = None, data: str | None = None) -> tuple[str, str]:
    """A sentence about the features as a guide for training, and the command to run.

    Args:
        features: the audited file of features or run folder, for the command; anything else is written as FEATURES.
        data: where the samples come from, for the command.
    """
    source = "DATA" if data is None else shlex.quote(data)
    share = audit.suggested_alpha if math.isnan(audit.kin_share) else audit.kin_share
    alpha, precision = _best_share(audit)
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


def _best_share(audit: Audit) -> tuple[float, float]:
    """The largest share of nearest samples that is mostly right, up to the share of false negatives, and its precision; where none is, the
    audited share."""
    limit = max(audit.suggested_alpha if math.isnan(audit.kin_share) else audit.kin_share, audit.alpha)
    points = [point for point in audit.survey.curve if point.rule == "one α" and math.isfinite(point.precision) and point.alpha <= limit]
    good = [(point.alpha, point.precision) for point in points if point.precision >= ELIMINATE]
    if good:
        return max(good)
    precision = audit.precision if math.isfinite(audit.precision) else estimated_precision(audit.alpha, audit.survey.level)
    return audit.alpha, precision
