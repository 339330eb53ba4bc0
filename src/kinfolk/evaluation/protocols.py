"""The protocols of `kinfolk eval` on images, and their results on disk.

Each `run_…` function returns what `RUN/eval/PROTOCOL.json` contains: nearest neighbours, linear
probes, transfer and clusters on the encoder's features, fine-tuning of the encoder, and the false
negatives that the method detects. The protocols for image–text models are in `retrieval`.

Dimension key: N training samples, V views, D embedding, B anchors.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from kinfolk.data.augmentation.views import Views
from kinfolk.detectors import GloFND
from kinfolk.embedding import Divided, Parts, divide, embed
from kinfolk.errors import KinfolkError, UsageError
from kinfolk.evaluation.detection import SEEDS, Normaliser
from kinfolk.evaluation.finetune import ListedSubset, label_subset, read_subset
from kinfolk.files import write_text
from kinfolk.seeding import generator

if TYPE_CHECKING:
    from kinfolk.data.images import ImageData
    from kinfolk.data.text import StreamedText, TextData
    from kinfolk.data.text_pairs import PairTexts
    from kinfolk.detectors import Detector
    from kinfolk.frameworks.base import Framework
    from kinfolk.frameworks.clip import Bimodal


FOLDER = "eval"


def write_result(run: Path | str, protocol: str, result: Mapping[str, Any]) -> Path:
    """Writes `{"protocol": …, **result}` to `RUN/eval/PROTOCOL.json`. Replaces an older file. NaN
    and infinity become null."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", protocol):
        raise ValueError(f"`protocol` (={protocol!r}) must be lower-case letters, digits, - and _")
    folder = Path(run) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{protocol}.json"
    text = json.dumps(_plain({"protocol": protocol, **result}), indent=2, allow_nan=False)
    write_text(path, text + "\n")
    return path


def read_results(run: Path | str) -> dict[str, dict[str, Any]]:
    """All results of a run by protocol, in alphabetical order. Empty if nothing has been
    evaluated."""
    results = {}
    for path in sorted((Path(run) / FOLDER).glob("*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise KinfolkError(
                f"{path} is not valid JSON ({error}); evaluate again, or remove it."
            ) from error
        if not isinstance(result, dict):
            raise KinfolkError(f"{path} is not a result; evaluate again, or remove it.")
        results[path.stem] = result
    return results


def _plain(value: Any) -> Any:
    """Converts `value` to JSON types: numpy and torch numbers to numbers, keys to text, numbers
    that are not finite to None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and hasattr(value, "ndim"):
        return _plain(value.item() if value.ndim == 0 else value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


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
    """Fine-tuning on shares of the labels, or on the labels listed in `lists`. Each starts from the
    given encoder. `accuracy` is the mean over them. `settings` is a name from
    `finetune.TUNINGS`."""
    from kinfolk.evaluation.finetune import finetune, tuning

    used = divide(parts, seed, "fine-tuning")
    cropping = Views(**{**views.config(), "jitter": 0.0, "grey": 0.0, "blur": 0.0, "solarise": 0.0})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids, labels, test_ids, test_labels = map(
        torch.from_numpy, (used.train_ids, used.train_y, used.test_ids, used.test_y)
    )
    wanted = [
        (fraction, label_subset(used.train_y, fraction, seed), of_subset(None, 0))
        for fraction in sorted(set(fractions), reverse=True)
    ]
    named = listed_among(used, lists, images.samples.keys)
    wanted += [
        (float(each.used.mean()), each.used, of_subset(each.name, each.listed)) for each in named
    ]
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
    """Stands in for the views in `embed`: returns one augmented view of each image, drawn anew in
    every call."""

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
    """Quality of the method's detection at the end of its training, over all training samples with
    two views each, in the contrasted space. The result also has the quality of the exact quantile,
    and the mean similarities of true positives and false negatives."""
    from kinfolk.evaluation.detection import kin_similarity

    num = images.num_train
    if images.labels is None or not bool((images.labels[:num] >= 0).any()):
        raise UsageError(
            "the training samples have no labels, so detected false negatives cannot be checked;"
            " give labelled data"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids, labels = torch.arange(num), images.labels[:num]
    parts = [
        embed(
            framework,
            images,
            Augmented(views, seed, view),
            ids,
            device=device,
            progress=progress,
            projected=True,
        )
        for view in range(NUM_VIEWS)
    ]
    framework.to("cpu")
    z_NVD = torch.stack(parts, 1)
    # several detectors each see a part of the embedding
    detector = framework.detectors[0] if len(framework.detectors) == 1 else None
    anchors = _drawn_anchors(num, most_anchors, seed)
    similar = kin_similarity(z_NVD, labels)
    return {
        **_detection(detector, z_NVD, z_NVD, labels, alpha, anchors, progress),
        "tp_similarity": similar.true_positive,
        "fn_similarity": similar.false_negative,
        "tn_similarity": similar.true_negative,
        **_measured_over(anchors, num, NUM_VIEWS, seed),
    }


def run_caption_kin(
    framework: Bimodal,
    images: ImageData,
    views: Views,
    text: TextData | StreamedText | PairTexts,
    seed: int,
    *,
    alpha: float | None = None,
    most_anchors: int = MOST_ANCHORS,
    progress: bool = False,
) -> dict[str, Any]:
    """As `run_kin`, of a method that learns from captions or text pairs: images against captions
    and captions against images, by the detector of each direction, and the mean of both. Without
    augmentation, and with the first caption of each sample.

    False negatives are samples of the same class or, in data without labels, of the same group:
    captions of one image, equal captions. A training never contrasts the samples of a group, so
    with groups the result says whether the detector would find them by itself."""
    num = images.num_train
    ids, labels, truth = torch.arange(num), images.labels, "labels"
    if labels is None or not bool((labels[:num] >= 0).any()):
        labels, truth = text.groups, "caption groups"
    labels = labels[:num]
    if not bool((torch.unique(labels[labels >= 0], return_counts=True)[1] > 1).any()):
        raise UsageError(
            "no two training samples share a label, an image or a caption, so detected false"
            " negatives cannot be checked"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    image_ND = embed(
        framework, images, views, ids, device=device, progress=progress, projected=True
    )
    with torch.no_grad():
        tokens = (
            text.draw(part, torch.zeros(len(part))).to(device) for part in torch.split(ids, 256)
        )
        text_ND = torch.cat([framework.embed_text(each).float().cpu() for each in tokens])
    framework.to("cpu")
    both, anchors = (
        (image_ND.unsqueeze(1), text_ND.unsqueeze(1)),
        _drawn_anchors(num, most_anchors, seed),
    )
    detectors = [each.detector for each in framework.objectives]
    detectors += [None] * (2 - len(detectors))  # SigLIP has one direction
    found: dict[str, Any] = {}
    for name, detector, (own, other) in zip(
        framework.directions, detectors, (both, both[::-1]), strict=True
    ):
        found[name] = _detection(detector, own, other, labels, alpha, anchors, progress)
    one, two = found.values()
    similar_N = (image_ND * text_ND).sum(1)
    return {
        **_mean_of(one, two),
        **found,
        "tp_similarity": float(similar_N.mean()),
        **_same_class_similarity(image_ND, text_ND, labels),
        "truth": truth,
        **_measured_over(anchors, num, 1, seed),
    }


def _drawn_anchors(num: int, most: int, seed: int) -> Tensor:
    return (
        torch.arange(num)
        if num <= most
        else torch.randperm(num, generator=generator(seed, "kin-anchors"))[:most].sort().values
    )


def _measured_over(anchors: Tensor, num: int, views: int, seed: int) -> dict[str, Any]:
    where = (
        "train split"
        if len(anchors) == num
        else f"{len(anchors):,} anchors against the train split"
    )
    return {
        "anchors": len(anchors),
        "samples": num,
        "views": views,
        "seed": seed,
        "measured_on": where,
    }


def _detection(
    detector: Detector | None,
    own: Tensor,
    other: Tensor,
    labels: Tensor,
    alpha: float | None,
    anchors: Tensor,
    progress: bool,
) -> dict[str, Any]:
    """Quality of a detector and of the exact quantile, and the error of learned thresholds, of (N,
    V, D) anchors and candidates. A detector that needs the embeddings of a guide is left out."""
    from kinfolk.evaluation.detection import detection_quality, threshold_error

    learner = (
        None
        if detector is None
        else next((part for part in detector.modules() if isinstance(part, GloFND)), None)
    )
    # no exact counterpart for an α per sample
    given = None if learner is None or learner.alphas is not None else learner.alpha
    share = alpha or given or ALPHA
    find = None if detector is None or detector.guide is not None else detector.find
    with torch.no_grad():
        found = detection_quality(
            own, labels, share, find, anchors=anchors, candidates=other, progress=progress
        )
    result: dict[str, Any] = {} if found.rule is None else found.rule.metrics()
    result["exact"] = found.exact.metrics()
    if learner is not None and share == given:
        result["threshold"] = threshold_error(
            learner.thresholds[anchors], found.thresholds
        )._asdict()
    return {**result, "alpha": share}


def _mean_of(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, Any]:
    """The mean of two results, figure by figure; of a figure that only the first has, that."""
    return {
        name: value
        if name not in two
        else _mean_of(value, two[name])
        if isinstance(value, Mapping)
        else (value + two[name]) / 2
        for name, value in one.items()
    }


def _same_class_similarity(image_ND: Tensor, text_ND: Tensor, labels: Tensor) -> dict[str, float]:
    """Mean similarity of an image and the caption of another sample of its class, and of a sample
    of another class."""
    known = labels >= 0
    class_N = torch.unique(labels[known], return_inverse=True)[1]
    sums = [
        torch.zeros(int(class_N.max()) + 1, each.shape[1])
        .index_add_(0, class_N, each[known])
        .double()
        for each in (image_ND, text_ND)
    ]
    own = (image_ND[known] * text_ND[known]).sum(1).double().sum()
    within, overall = (sums[0] * sums[1]).sum(), sums[0].sum(0) @ sums[1].sum(0)
    size_K = torch.bincount(class_N).double()
    alike, others = (size_K * (size_K - 1)).sum(), size_K.sum().square() - size_K.square().sum()
    return {
        "fn_similarity": float((within - own) / alike) if alike else math.nan,
        "tn_similarity": float((overall - within) / others) if others else math.nan,
    }


def run_knn(parts: Parts, k: int, temperature: float) -> dict[str, Any]:
    """Weighted nearest neighbours, on the test split or with leave-one-out."""
    import torch

    from kinfolk.evaluation.probes import knn_accuracy

    device = "cuda" if torch.cuda.is_available() else None
    accuracy = knn_accuracy(
        parts.train_x,
        parts.train_y,
        parts.test_x,
        parts.test_y,
        k=k,
        temperature=temperature,
        device=device,
    )
    where = "each sample by all others" if parts.test_y is None else f"{parts.test_split} split"
    tested = len(parts.train_y if parts.test_y is None else parts.test_y)
    return {
        "accuracy": accuracy,
        "k": k,
        "temperature": temperature,
        "train": len(parts.train_y),
        "test": tested,
        "measured_on": where,
    }


def run_linear(
    parts: Parts, seed: int, probe: str = "lbfgs", *, progress: bool = False
) -> dict[str, Any]:
    """Linear probe, on the test split or on a held-out fifth of each class."""
    from kinfolk.evaluation.gradient_probe import gradient_probe
    from kinfolk.evaluation.probes import linear_probe

    used = divide(parts, seed, "the linear probe")
    given = (used.train_x, used.train_y, used.test_x, used.test_y)
    if probe == "lbfgs":
        fitted = linear_probe(*given, seed=seed, progress=progress)
        found = {
            "accuracy": fitted.accuracy,
            **with_top5(fitted.top5),
            "strength": fitted.strength,
            "converged": fitted.converged,
        }
    else:
        trained = gradient_probe(*given, probe, seed=seed, progress=progress)
        found = {
            "accuracy": trained.accuracy,
            **with_top5(trained.top5),
            "epochs": trained.epochs,
            "loss": trained.loss,
        }
    counts = {"train": len(used.train_y), "test": len(used.test_y)}
    return {**found, "probe": probe, **counts, "seed": seed, "measured_on": used.measured_on}


def run_semi(
    parts: Parts,
    seed: int,
    probe: str = "lbfgs",
    *,
    fractions: Sequence[float],
    draws: int,
    lists: Sequence[Path] = (),
    keys: Sequence[str] = (),
    progress: bool = False,
) -> dict[str, Any]:
    """Linear probes on shares of the labels, or on the labels listed in `lists`. `accuracy` is the
    mean over them, as in the column Average of Table 1 of the GloFND paper. `keys` are the keys of
    all samples, needed for the lists."""
    from kinfolk.evaluation.finetune import semi_supervised

    used = divide(parts, seed, "the linear probe")
    given = (used.train_x, used.train_y, used.test_x, used.test_y)
    named = listed_among(used, lists, keys)
    found = semi_supervised(
        *given,
        fractions=fractions,
        subsets=named,
        draws=draws,
        probe=probe,
        seed=seed,
        progress=progress,
    )
    rows = [
        {
            **of_subset(each.subset, each.listed),
            "fraction": each.fraction,
            "labels": each.labels,
            "accuracy": each.accuracy,
            "deviation": each.deviation,
            **with_top5(each.top5),
        }
        for each in found
    ]
    return {
        **averages(rows),
        "fractions": rows,
        "draws": draws,
        "probe": probe,
        "train": len(used.train_y),
        "test": len(used.test_y),
        "seed": seed,
        "measured_on": used.measured_on,
    }


def listed_among(used: Divided, lists: Sequence[Path], keys: Sequence[str]) -> list[ListedSubset]:
    """The training samples that each list names."""
    return [read_subset(path, [keys[row] for row in used.train_ids]) for path in lists]


def of_subset(name: str | None, listed: int) -> dict[str, Any]:
    """Name and size of the list that labels were taken from. Empty if they were drawn."""
    return {} if name is None else {"subset": name, "listed": listed}


def with_top5(share: float) -> dict[str, float]:
    """`{"top5": share}`, or empty if there are too few classes."""
    return {"top5": share} if math.isfinite(share) else {}


def averages(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over the shares of the labels: `accuracy`, and `top5` where all have one."""
    names = [name for name in ("accuracy", "top5") if all(name in row for row in rows)]
    return {name: statistics.fmean(row[name] for row in rows) for name in names}


def run_transfer(
    parts: Parts,
    seed: int,
    source: str,
    metric: str | None,
    before: Mapping[str, Any] | None = None,
    *,
    how: Mapping[str, str] | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Logistic regression on one more data set. Results `before` on other data sets are kept.
    `accuracy` is the mean over the data sets. `how` holds further entries about the features of
    this one."""
    from kinfolk.evaluation.transfer import metric_of, transfer

    used = divide(parts, seed, "transfer")
    several = used.train_y.ndim == 2
    chosen: Any = metric or ("map" if several else metric_of(source))
    found = transfer(
        used.train_x, used.train_y, used.test_x, used.test_y, chosen, seed=seed, progress=progress
    )
    name = (
        PurePath(source).stem
        if PurePath(source).suffix in (".npz", ".npy", ".csv", ".tsv", ".parquet")
        else PurePath(source).name
    )
    own = {
        "name": name,
        "metric": found.metric,
        "accuracy": found.value,
        "top1": found.top1,
        "mean_per_class": found.mean_per_class,
        "map": found.map,
        "map_11": found.map_11,
        "strength": found.strength,
        "converged": found.converged,
        "train": len(used.train_y),
        "test": len(used.test_y),
        "seed": seed,
        "data": source,
        **(how or {}),
        "measured_on": used.measured_on,
    }
    sets = [each for each in (before or {}).get("sets", []) if each.get("name") != name]
    sets = sorted([*sets, own], key=lambda each: str(each["name"]))
    where = used.measured_on if len(sets) == 1 else f"{len(sets)} data sets"
    return {
        "accuracy": statistics.fmean(each["accuracy"] for each in sets),
        "sets": sets,
        "measured_on": where,
    }


def run_clusters(
    parts: Parts,
    num_clusters: int | None = None,
    seeds: Sequence[int] = SEEDS,
    normaliser: Normaliser = "arithmetic",
) -> dict[str, Any]:
    """Normalised mutual information of the labels and the k-means clusters of the training
    features, over several k-means runs."""
    from kinfolk.evaluation.detection import nmi

    k = len(np.unique(parts.train_y)) if num_clusters is None else num_clusters
    found = nmi(parts.train_x, parts.train_y, k, seeds, normaliser)
    where = "train split" if parts.test_split else "all samples"
    return {
        "nmi": found.mean,
        "deviation": found.deviation,
        "normaliser": normaliser,
        "num_clusters": k,
        "seeds": list(seeds),
        "samples": len(parts.train_y),
        "measured_on": where,
    }
