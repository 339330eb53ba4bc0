"""The protocols as `kinfolk eval` runs them on more than features: fine-tuning of the encoder, and the false negatives of the method.

Each returns what `RUN/eval/PROTOCOL.json` holds. Dimension key: N training samples, V views, D embedding, B anchors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kinfolk.data.seeding import generator
from kinfolk.data.views import Views
from kinfolk.detectors import GloFND
from kinfolk.errors import UsageError
from kinfolk.evaluation.embed import embed
from kinfolk.evaluation.parts import Parts, divide
from kinfolk.evaluation.protocols import averages, listed_among, of_subset
from kinfolk.evaluation.subsets import label_subset

if TYPE_CHECKING:
    from kinfolk.data.images import ImageData
    from kinfolk.frameworks.base import Framework

FINETUNED = (0.1, 0.01)
MOST_ANCHORS, ALPHA, NUM_VIEWS = 10_000, 0.01, 2


def run_finetune(
    encoder: nn.Module,
    images: ImageData,
    views: Views,
    parts: Parts,
    seed: int,
    *,
    fractions: Sequence[float] = FINETUNED,
    lists: Sequence[Path] = (),
    settings: str = "ifnd",
    epochs: int | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Fine-tuning on shares of the labels, or on those that `lists` name, each from the encoder as it is; `accuracy` is the mean over them.
    `settings`: a name of `finetune.TUNINGS`."""
    from kinfolk.evaluation.finetune import finetune, tuning

    used = divide(parts, seed, "fine-tuning")
    cropping = Views(**{**views.config(), "jitter": 0.0, "grey": 0.0, "blur": 0.0, "solarise": 0.0})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids, labels, test_ids, test_labels = map(torch.from_numpy, (used.train_ids, used.train_y, used.test_ids, used.test_y))
    wanted = [
        (fraction, label_subset(used.train_y, fraction, seed), of_subset(None, 0)) for fraction in sorted(set(fractions), reverse=True)
    ]
    named = listed_among(used, lists, images.samples.keys)
    wanted += [(float(each.used.mean()), each.used, of_subset(each.name, each.listed)) for each in named]
    rows = []
    for fraction, mask, subset in wanted:
        chosen = torch.from_numpy(mask)
        found = finetune(
            encoder,
            images,
            cropping,
            (ids[chosen], labels[chosen]),
            (test_ids, test_labels),
            epochs=epochs,
            seed=seed,
            device=device,
            progress=progress,
            **tuning(settings, fraction),
        )
        rows.append({**subset, "fraction": fraction, "labels": int(chosen.sum()), **asdict(found)})
        if found.top5 != found.top5:
            del rows[-1]["top5"]
    return {
        **averages(rows),
        "fractions": rows,
        "finetuning": settings,
        "train": len(labels),
        "test": len(test_labels),
        "seed": seed,
        "measured_on": used.measured_on,
    }


class Augmented:
    """Augmented images where `embed` asks for them as they are: one view of each, drawn anew in every call."""

    def __init__(self, views: Views, seed: int, version: int) -> None:
        self.views, self.seed, self.version, self.calls = views, seed, version, 0

    def evaluate(self, pixels: Tensor, aspect: Tensor | None = None) -> Tensor:
        """(B, 3, size, size) augmented."""
        draw = generator(self.seed, "augmented", self.version, self.calls, device=pixels.device)
        self.calls += 1
        return self.views(pixels, draw, aspect=aspect, num_views=1)[0]


def run_kin(
    framework: Framework,
    images: ImageData,
    views: Views,
    seed: int,
    *,
    alpha: float | None = None,
    most_anchors: int = MOST_ANCHORS,
    progress: bool = False,
) -> dict[str, Any]:
    """Whom the method flags at the end of its training, over all its training samples and two views of each, in the space it contrasts;
    beside it what the exact quantile would flag, and how similar true positives and false negatives are."""
    from kinfolk.evaluation.kin import judge_kin
    from kinfolk.evaluation.similarity import kin_similarity, threshold_error

    num = images.num_train
    if images.labels is None or not bool((images.labels[:num] >= 0).any()):
        raise UsageError("the training samples have no labels; whether a flagged pair is a false negative can't be told")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids, labels = torch.arange(num), images.labels[:num]
    parts = [
        embed(framework, images, Augmented(views, seed, view), ids, device=device, progress=progress, projected=True)
        for view in range(NUM_VIEWS)
    ]
    framework.to("cpu")
    z_NVD = torch.stack(parts, 1)
    detector = framework.detectors[0] if len(framework.detectors) == 1 else None  # several see parts of the embedding
    learner = None if detector is None else next((part for part in detector.modules() if isinstance(part, GloFND)), None)
    own = None if learner is None or learner.alphas is not None else learner.alpha  # an α of each sample's own has no exact peer here
    share = alpha or own or ALPHA
    anchors = ids if num <= most_anchors else torch.randperm(num, generator=generator(seed, "kin-anchors"))[:most_anchors].sort().values
    find = None if detector is None else lambda block: detector.find(block).levels
    with torch.no_grad():
        found = judge_kin(z_NVD, labels, share, find, anchors=anchors, progress=progress)
    similar = kin_similarity(z_NVD, labels)
    result: dict[str, Any] = {} if found.rule is None else found.rule.metrics()
    result["exact"] = found.exact.metrics()
    if learner is not None and share == own:
        result["threshold"] = threshold_error(learner.thresholds[anchors], found.thresholds)._asdict()
    return {
        **result,
        "tp_similarity": similar.true_positive,
        "fn_similarity": similar.false_negative,
        "tn_similarity": similar.true_negative,
        "alpha": share,
        "anchors": len(anchors),
        "samples": num,
        "views": NUM_VIEWS,
        "seed": seed,
        "measured_on": "train split" if len(anchors) == num else f"{len(anchors):,} anchors against the train split",
    }
