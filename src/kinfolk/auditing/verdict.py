"""The verdict of an audit in plain sentences: how many false negatives there are, which α to use, what to do, and the commands for it.

The advice follows the study in docs/results.md. What pays is attracting pairs that come from outside the encoder: labels, the features of
another model (a guide), or those of patches of the same images, even if many of the pairs are wrong. Eliminating pairs is worth little,
and pairs by the encoder's own similarity gained nothing. `STUDY` has the figures, and `recommend` is the rule that follows from them.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from kinfolk.auditing.alpha import batch_lines, kin_shares

if TYPE_CHECKING:
    from kinfolk.auditing.result import Audit

Source = Literal["labels", "another model", "patches", "own encoder"]
Action = Literal["none", "other pairs", "attract"]


@dataclass(frozen=True)
class Measured:
    """One row of the study: the gain over `simclr` in points of kNN accuracy, for pairs of this source, precision and recall."""

    source: Source
    action: str
    data: str
    precision: float
    recall: float
    gain: float
    seeds: int


STUDY = (
    Measured("labels", "attract", "GTSRB", 1.0, 1.0, 27.3, 4),
    Measured("labels", "attract", "CIFAR-10", 1.0, 1.0, 6.4, 4),
    Measured("labels", "eliminate", "GTSRB", 1.0, 1.0, 4.7, 4),
    Measured("another model", "attract", "GTSRB", 0.132, 0.451, 17.1, 4),
    Measured("another model", "attract", "GTSRB", 0.207, 0.234, 12.6, 1),
    Measured("another model", "attract", "GTSRB", 0.291, 0.115, 11.0, 1),
    Measured("another model", "attract", "CIFAR-10", 0.371, 0.230, 4.5, 4),
    Measured("another model", "attract", "CIFAR-10", 0.470, 0.066, 2.1, 1),
    Measured("patches", "attract", "GTSRB", 0.158, 0.445, 13.3, 4),
    Measured("patches", "attract", "CIFAR-10", 0.203, 0.226, 3.0, 4),
    Measured("own encoder", "attract", "GTSRB", 0.218, 0.080, 0.4, 1),
    Measured("own encoder", "attract", "GTSRB", 0.148, 0.158, -1.9, 1),
    Measured("own encoder", "eliminate", "GTSRB", 0.313, 0.018, -0.1, 4),
)
"""The rows of docs/results.md that the rule follows; "own encoder" is the similarity of an encoder that was trained on the same images."""

LOWEST_PRECISION = 0.13
"""The lowest precision at which attracting the pairs of another model gained clearly, so the share of pairs is chosen as large as this
precision allows: the gain grows with recall. At 0.05, with a hundred classes, kNN gained half a point and the linear probe lost."""
LARGEST_SHARE = 0.1
"""The largest share of the samples that was attracted for each anchor."""
ABOVE_CHANCE = 2.0
"""Times the share of false negatives that the precision must reach; below it the features know nothing of the classes."""
FEW, MANY = 0.003, 0.03
"""Shares of false negatives among the negatives: below the first they are few, above the second many."""
STANDS_OUT = 0.5
"""Without labels: share of the flagged pairs that must exceed what unrelated samples explain."""

BATCH = 256
REFERENCES = (("ImageNet-1k", 0.001), ("CIFAR-100", 0.01), ("CIFAR-10", 0.1))
"""Share of false negatives in well-known data sets: one over the number of classes."""


def recommend(source: Source, share: float, precision: float, measured: bool) -> Action:
    """What to do with pairs: attract them, use other pairs, or train without any.

    Args:
        source: where the pairs come from.
        share: share of false negatives among the negatives.
        precision: share of the pairs that are right, if `measured` with labels; otherwise the share that stands out; see `standing_out`.
    """
    if share < FEW:
        return "none"
    if source == "own encoder":
        return "other pairs"
    good = precision >= max(LOWEST_PRECISION, ABOVE_CHANCE * share) if measured else precision >= STANDS_OUT
    return "attract" if good or source == "labels" else "other pairs"


@dataclass(frozen=True)
class Provenance:
    """Where audited samples and features come from, for the words and commands of the verdict.

    Args:
        data: what `kinfolk train --data` takes for the samples; None if it is not known.
        labels_from_folders: whether the labels are the folders of the images.
        has_labels: whether a training on `data` finds labels.
        encoder: what computed the features, in words.
        own: whether an encoder computed them that was trained on the same samples without labels or another model.
        guide: what `kinfolk train --guide` takes for the features: a file, a run or a name; None if it is not known.
    """

    data: str | None = None
    labels_from_folders: bool = False
    has_labels: bool = False
    encoder: str | None = None
    own: bool = False
    guide: str | None = None

    @property
    def source(self) -> Source:
        return "own encoder" if self.own else "patches" if self.guide == "patches" else "another model"


UNKNOWN = Provenance()


@dataclass(frozen=True)
class Verdict:
    """The result of an audit in words.

    Args:
        amount: how many false negatives a batch contains, and whether that is few or many.
        alpha: the suggested α with its uncertainty.
        precision: how many flags are right.
        advice: what to do, and the measurements behind it.
        action: "none", "other pairs" or "attract".
        commands: what each command is for, and the command; the advised one is first.
    """

    amount: str
    alpha: str
    precision: str
    advice: str
    action: Action
    commands: tuple[tuple[str, str], ...]

    @property
    def sentences(self) -> list[str]:
        """All sentences in order."""
        return [self.amount, self.alpha, self.precision, self.advice]


def verdict(audit: Audit, origin: Provenance = UNKNOWN) -> Verdict:
    """What the audit means for a training on these samples."""
    share = audit.suggested_alpha if math.isnan(audit.kin_share) else audit.kin_share
    alpha, precision, measured = _share_to_attract(audit)
    action = recommend(origin.source, share, precision, measured)
    return Verdict(
        _amount(audit, share),
        _alpha_sentence(audit),
        _precision_sentence(audit),
        _advice(action, origin, alpha, precision, measured),
        action,
        tuple(_commands(action, origin, alpha, share)),
    )


def standing_out(alpha: float, level: float) -> float:
    """Share of the flagged pairs in excess of a normal distribution of unrelated pairs.

    It is not a precision: pairs also stand out by colour or background.

    Args:
        alpha: share of flagged pairs.
        level: z above which that share lies; see `similarity_spread`.
    """
    unrelated = 0.5 * math.erfc(level / math.sqrt(2))
    return min(1.0, max(0.0, 1 - unrelated / alpha))


def _share_to_attract(audit: Audit) -> tuple[float, float, bool]:
    """α for attracting: the largest share that the study supports, with its precision and whether that was measured with labels.

    Without labels it is the suggested α. With the features of the study's guide that is 0.09 on GTSRB and 0.07 on CIFAR-10, where 0.1 and
    0.05 gained most.
    """
    points = [point for point in audit.survey.curve if point.rule == "one α" and math.isfinite(point.precision)]
    if not points:
        return min(max(audit.suggested_alpha, audit.alpha), LARGEST_SHARE), standing_out(audit.alpha, audit.survey.level), False
    enough = max(LOWEST_PRECISION, ABOVE_CHANCE * audit.kin_share)
    good = [(point.alpha, point.precision) for point in points if point.precision >= enough and point.alpha <= LARGEST_SHARE]
    return (*max(good, default=(audit.alpha, audit.precision)), True)


def _amount(audit: Audit, share: float) -> str:
    (line,) = batch_lines(kin_shares(audit.labels, audit.suggested_alpha), max(len(audit), BATCH), (BATCH,))
    size = "few" if share < FEW else "many" if share >= MANY else "a moderate number"
    closest = min(REFERENCES, key=lambda each: abs(math.log(max(share, 1e-9) / each[1])))[0]
    basis = "a rough estimate from the similarities" if math.isnan(audit.kin_share) else "by the labels"
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


def _precision_sentence(audit: Audit) -> str:
    if not math.isnan(audit.precision):
        return f"At α = {audit.alpha:g}, {audit.precision:.0%} of the flagged pairs are right by the labels."
    stands = standing_out(audit.alpha, audit.survey.level)
    return (
        f"At α = {audit.alpha:g}, {stands:.0%} of the flagged pairs stand out from unrelated ones. How many are right is unknown without "
        "labels, because pairs also stand out by colour or background: check the gallery."
    )


def _gains(source: Source, action: str) -> str:
    """The largest measured gain on each data set, in words."""
    rows = [row for row in STUDY if (row.source, row.action) == (source, action)]
    by_data = {row.data: max(other.gain for other in rows if other.data == row.data) for row in rows}
    return " and ".join(f"{gain:.1f} points on {data}" for data, gain in by_data.items())


def _advice(action: Action, origin: Provenance, alpha: float, precision: float, measured: bool) -> str:
    if action == "none":
        return "Advice: train without a detector. So few false negatives leave little to gain; the study has no data set with so few."
    if action == "attract":
        if_outside = "" if origin.encoder is not None else "if these features come from a model that was not trained on these images, "
        right = f" ({precision:.0%} of these pairs are right)" if measured else ""
        rows = [row.precision for row in STUDY if (row.source, row.action) == (origin.source, "attract")]
        return (
            f"Advice: {if_outside}attract the nearest {100 * alpha:.2g}% of the samples{right}. Attracting the pairs of "
            f"{'patches' if origin.source == 'patches' else 'another model'} gained up to {_gains(origin.source, 'attract')} (kNN). "
            f"Only {min(rows):.0%} to {max(rows):.0%} of them were right; more pairs gained more."
        )
    why = (
        "These features come from an encoder that was trained on the same images. Pairs that such an encoder finds gained nothing in the "
        "study, with up to four seeds each."
        if origin.own
        else "These features are too weak as a guide: their pairs are hardly better than chance."
    )
    if origin.source == "patches":
        return f"Advice: do not use these pairs. {why} Attract those of another model."
    return (
        f"Advice: do not use these pairs. {why} Attract other pairs: those of another model, or those of patches of these images, which "
        f"need nothing from outside and gained {_gains('patches', 'attract')} (kNN) in short trainings of small encoders."
    )


def _commands(action: Action, origin: Provenance, alpha: float, share: float) -> list[tuple[str, str]]:
    data = "DATA" if origin.data is None else shlex.quote(origin.data)
    data += " --labels-from-folders" if origin.labels_from_folders else ""
    plain = ("Next", f"kinfolk train --data {data} --out runs/simclr --method simclr")
    prior = f"kinfolk train --data {data} --out runs/debiased --method simclr --set framework.prior={share:.2g}"
    if action == "none":
        return [plain]
    commands = []
    if action == "attract":
        guide = "FEATURES.npy" if origin.guide is None else shlex.quote(origin.guide)
        commands.append(
            (
                "Next",
                f"kinfolk train --data {data} --out runs/guided --method simclr+guide:attract --guide {guide} "
                f"--set detector.alpha={alpha:.2g}",
            )
        )
    else:
        commands += _other_pairs(data, origin.source)
    commands.append(("Without pairs, with the share of false negatives as a prior (one run gained nothing)", prior))
    if origin.has_labels:
        gains = _gains("labels", "attract")
        commands.append(
            (
                f"If the labels may be used in training ({gains})",
                f"kinfolk train --data {data} --out runs/supervised --method simclr+oracle:attract",
            )
        )
    return commands


def _other_pairs(data: str, source: Source) -> list[tuple[str, str]]:
    """Commands that attract other pairs than those of `source`."""
    package = next((name for name in ("timm", "torchvision") if find_spec(name) is not None), None)
    needs = "" if package else " (after `pip install timm`)"
    another = f"kinfolk advise {data} --guide {package or 'timm'}/resnet50 --out advice-guide"
    if source == "patches":
        return [(f"Next{needs}", another)]
    by_patches = f"kinfolk train --data {data} --out runs/guided --method simclr+guide:attract --guide patches"
    return [("Next", by_patches), (f"With the pairs of another model{needs}", another)]
