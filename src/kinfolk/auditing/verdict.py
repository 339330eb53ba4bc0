"""The verdict of an audit: what was measured, and what is worth a try. Which method helps is not
known before it has been trained, so it names methods, not gains."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kinfolk.auditing.similarities import batch_line, kin_shares

if TYPE_CHECKING:
    from kinfolk.auditing.run_audit import Audit

BATCH = 256
MOST = 0.5
ABOVE_CHANCE = 2.0
"""Times the share of equal labels that the precision must have to be better than chance."""
REFERENCES = (("ImageNet-1k", 0.001), ("CIFAR-100", 0.01), ("CIFAR-10", 0.1))


@dataclass(frozen=True)
class Provenance:
    """Where audited samples and features come from. `data`, `guide` and `model` (of sentences) are
    for a training with these samples; `encoder` says in words what computed the features,
    `same_samples` whether it learned from these samples alone, without labels or another model;
    `captions`: it learned from captions, or the samples are sentences."""

    data: str | None = None
    labels_from_folders: bool = False
    has_labels: bool = False
    encoder: str | None = None
    same_samples: bool = False
    guide: str | None = None
    framework: str = "simclr"
    captions: bool = False
    model: str | None = None

    @property
    def data_options(self) -> str:
        data = "DATA" if self.data is None else shlex.quote(self.data)
        data += " --labels-from-folders" if self.labels_from_folders else ""
        return data + ("" if self.model is None else f" --model {shlex.quote(self.model)}")


UNKNOWN = Provenance()


@dataclass(frozen=True)
class Candidate:
    purpose: str
    name: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def command(self, data: str) -> str:
        """`data`: a quoted source with its options."""
        command = f"kinfolk train --data {data} --out runs/{self.name} --method {self.method}"
        for key, value in self.settings.items():
            guide = key == "detector.features"
            command += f" --guide {shlex.quote(str(value))}" if guide else f" --set {key}={value:g}"
        return command


@dataclass(frozen=True)
class Verdict:
    amount: str
    alpha: str
    precision: str
    advice: str
    commands: tuple[tuple[str, str], ...]

    @property
    def sentences(self) -> list[str]:
        return [self.amount, self.alpha, self.precision, self.advice]


def verdict(audit: Audit, origin: Provenance = UNKNOWN) -> Verdict:
    advice, commands = _advice(audit, origin), tuple(_commands(audit, origin))
    return Verdict(_amount(audit), _alpha(audit), _precision(audit), advice, commands)


def suggest_alpha(audit: Audit) -> tuple[float | None, str]:
    """The α of the commands and why: with labels `Audit.best_alpha`, otherwise the share that
    stands out."""
    if math.isnan(audit.kin_share):
        if audit.suggested_alpha is None:
            return None, "no pairs stand out clearly"
        return audit.suggested_alpha, "the share of pairs that stands out"
    if audit.best_alpha is None:
        return None, "at every α most of the flagged pairs are wrong by the labels"
    if audit.curve.best_alpha(precision=0) == audit.best_alpha:
        return audit.best_alpha, "where F1 is highest with these labels"
    why = "the largest at which at least half of the flagged pairs are right by the labels"
    return audit.best_alpha, why


def _amount(audit: Audit) -> str:
    share = audit.kin_share
    line = batch_line(kin_shares(audit.labels, audit.outstanding.share), BATCH, audit.views)
    of = f"{line.negatives} negatives in a batch of {BATCH}"
    if not math.isnan(share):
        closest = min(REFERENCES, key=lambda each: abs(math.log(max(share, 1e-9) / each[1])))
        basis = "by the labels"
        labelled = 0 if audit.labels is None else int((audit.labels >= 0).sum())
        if labelled < len(audit):
            low, high = audit.kin_share_range
            basis += (
                f" of {labelled:,} samples; if these are a random part, the 95% interval is"
                f" {low:.2%} to {high:.2%}"
            )
        return (
            f"Each anchor has {line.per_anchor:.1f} false negatives among its {of} ({share:.2%},"
            f" {basis}). For comparison: {closest[0]} has {closest[1]:.1%}."
        )
    found = (
        "No pairs stand out clearly from unrelated ones: these features cannot tell."
        if audit.suggested_alpha is None
        else f"At least {audit.outstanding.share:.2%} of all pairs stand out from unrelated ones:"
        f" {line.per_anchor:.1f} of an anchor's {of}."
    )
    return (
        f"{found} How many negatives are false is unknown without labels, because it depends on"
        " what counts as the same. Labels of 200 random samples are enough for an estimate"
        " (--labels)."
    )


def _alpha(audit: Audit) -> str:
    alpha, why = suggest_alpha(audit)
    text = f"No α is suggested, because {why}."
    if alpha is not None:
        text = f"Suggested α: {alpha:g}, {why}."
    if audit.alpha >= MOST:
        text += (
            f" Warning: α = {audit.alpha:g} flags most negatives; a training would have few left."
        )
    return text


def _precision(audit: Audit) -> str:
    at = f"At α = {audit.alpha:g}, "
    if not math.isnan(audit.precision):
        return f"{at}{audit.precision:.0%} of the flagged pairs are right by the labels."
    if not audit.flagged.any():
        return f"{at}nothing is flagged."
    if audit.suggested_alpha is None:
        return f"{at}the flagged pairs are hardly more than chance explains."
    stands = audit.outstanding.at(audit.alpha)
    found = "the flagged pairs do not stand out"
    if stands > 0:
        found = f"at least {stands:.0%} of the flagged pairs stand out"
    return f"{at}{found}. Pairs also stand out by colour, background or topic: check the gallery."


def beats_chance(audit: Audit) -> bool:
    """Whether flagged pairs are clearly more than chance, at the audit's α or at the best one."""
    if math.isnan(audit.precision):
        return audit.suggested_alpha is not None
    alphas = (audit.alpha, audit.best_alpha or audit.alpha)
    least = ABOVE_CHANCE * audit.kin_share
    return any(audit.curve.at(alpha).precision >= least for alpha in alphas)


def _advice(audit: Audit, origin: Provenance) -> str:
    if not beats_chance(audit):
        return (
            "Worth a try: these features tell little (their flagged pairs are hardly better than"
            " chance), so audit better ones first, or train without a detector."
        )
    source = "The origin of these features is unknown. " if origin.encoder is None else ""
    if origin.same_samples:
        source = (
            "These features come from an encoder that was trained on the same samples, so its pairs"
            " add no knowledge from outside. "
        )
    return (
        f"{source}Worth a try: the commands below. Which of them helps on this data has not been"
        " measured: `kinfolk advise DATA --try MINUTES` trains them with equal budgets and compares"
        " them."
    )


def candidates(audit: Audit, origin: Provenance = UNKNOWN) -> list[Candidate]:
    """The first has no detector, to compare with."""
    base, (alpha, _) = origin.framework, suggest_alpha(audit)
    found = [Candidate("Without a detector, to compare with", base, base)]
    if not beats_chance(audit):
        return found
    at = {} if alpha is None else {"detector.alpha": alpha}
    if at:
        purpose = "False negatives found during the training"
        found.append(Candidate(purpose, "glofnd", f"{base}+glofnd", at))
    if origin.captions:
        purpose = "The most similar ones of each batch"
        return [*found, Candidate(purpose, "fnc", f"{base}+fnc", at)] if at else found
    purpose = "The pairs of these features as positives"
    settings = {"detector.features": origin.guide or "FEATURES.npy", **at}
    if origin.same_samples:
        purpose = "The pairs of patch features as positives"
        settings = {"detector.features": "patches"}
    return [*found, Candidate(purpose, "guided", f"{base}+guide:attract", settings)]


def _commands(audit: Audit, origin: Provenance) -> list[tuple[str, str]]:
    data, found = origin.data_options, candidates(audit, origin)
    commands = [(each.purpose, each.command(data)) for each in found]
    if len(found) == 1 and not origin.captions:
        better = f"kinfolk advise {data} --guide timm/resnet50 --out advice-guide"
        commands.append(("The same with a pretrained network (needs `pip install timm`)", better))
    if origin.has_labels:
        supervised = Candidate("", "supervised", f"{origin.framework}+oracle:attract")
        commands.append(("If the labels may be used in training", supervised.command(data)))
    return commands
