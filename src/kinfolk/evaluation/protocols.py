"""The protocols of `kinfolk eval` on images: each `run_…` function returns what
`RUN/eval/PROTOCOL.json` contains."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kinfolk.data.views import Views
from kinfolk.detectors import GloFND
from kinfolk.embedding import LabelledFeatures, best_device, divide, embed
from kinfolk.errors import UsageError
from kinfolk.evaluation import gradient_training
from kinfolk.evaluation.detection import (
    SEEDS,
    Normaliser,
    detection_quality,
    kin_similarity,
    nmi,
    spread,
    threshold_error,
)
from kinfolk.evaluation.probes import knn_accuracy, linear_probe, metric_of, transfer
from kinfolk.files import read_json_objects, to_json, write_text
from kinfolk.seeding import draw_ids, generator

if TYPE_CHECKING:
    from kinfolk.data.images import ImageData
    from kinfolk.data.text import PairTexts, TextData
    from kinfolk.detectors import Detector
    from kinfolk.embedding import Preparation
    from kinfolk.frameworks.base import Framework

FOLDER = "eval"
FINETUNED = (0.1, 0.01)
DRAWS = 3
MOST_ANCHORS, ALPHA, NUM_VIEWS = 10_000, 0.01, 2


def write_result(run: Path | str, protocol: str, result: Mapping[str, Any]) -> Path:
    """NaN and infinity become null."""
    folder = Path(run) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{protocol}.json"
    text = json.dumps(to_json({"protocol": protocol, **result}), indent=2, allow_nan=False)
    write_text(path, text + "\n")
    return path


def read_results(run: Path | str) -> dict[str, dict[str, Any]]:
    return read_json_objects(Path(run) / FOLDER)


def _sizes(used: LabelledFeatures, seed: int) -> dict[str, Any]:
    sizes = {"train": len(used.train_y), "test": len(used.test_y)}
    return {**sizes, "seed": seed, "measured_on": used.measured_on}


# Classifiers and clusters


def run_knn(parts: LabelledFeatures, k: int, temperature: float) -> dict[str, Any]:
    test_x, test_y = (parts.test_x, parts.test_y) if parts.measured_on else (None, None)
    data = (parts.train_x, parts.train_y, test_x, test_y)
    return {
        "accuracy": knn_accuracy(*data, k=k, temperature=temperature, device=best_device()),
        "k": k,
        "temperature": temperature,
        "train": len(parts.train_y),
        "test": len(parts.test_y if parts.measured_on else parts.train_y),
        "measured_on": parts.measured_on or "each sample by all others",
    }


def run_linear(parts: LabelledFeatures, seed: int, probe: str = "lbfgs") -> dict[str, Any]:
    used = divide(parts, seed, "the linear probe")
    found = _probe(used, slice(None), probe, seed)
    kept = ("accuracy", "top5", "strength", "converged", "epochs", "steps", "loss")
    finite = {key: found[key] for key in kept if found.get(key, math.nan) == found.get(key)}
    return {**finite, "probe": probe, **_sizes(used, seed)}


def _probe(
    used: LabelledFeatures,
    rows: slice | NDArray[np.bool_],
    probe: str,
    seed: int,
    fraction: float = 1.0,
) -> dict[str, Any]:
    """`probe`: "lbfgs" or a name from `PROBES`."""
    data = (used.train_x[rows], used.train_y[rows], used.test_x, used.test_y)
    if probe == "lbfgs":
        return asdict(linear_probe(*data, seed=seed))
    return asdict(gradient_training.gradient_probe(*data, probe, fraction=fraction, seed=seed))


def run_semi(
    parts: LabelledFeatures,
    seed: int,
    probe: str = "lbfgs",
    *,
    fractions: Sequence[float],
    lists: Sequence[Path] = (),
    keys: Sequence[str] = (),
) -> dict[str, Any]:
    """Linear probes on class-balanced shares of the labels, `DRAWS` for each share below 1, or on
    the labels listed in `lists` by the `keys` of all samples (GloFND, Tables 1 and 7, Figure 4)."""
    used = divide(parts, seed, "the linear probe")
    rows = []
    for about, masks in _shares(used, fractions, lists, keys, seed, DRAWS):
        found = [
            _probe(used, mask, probe, seed + draw, about["fraction"])
            for draw, mask in enumerate(masks)
        ]
        accuracy, deviation = spread([each["accuracy"] for each in found])
        top5 = statistics.fmean(each["top5"] for each in found)
        labels = int(masks[0].sum())
        row = {"labels": labels, "accuracy": accuracy, "deviation": deviation, "top5": top5}
        rows.append({**about, **row})
    return {**_over_shares(rows), "draws": DRAWS, "probe": probe, **_sizes(used, seed)}


def run_finetune(
    encoder: nn.Module,
    images: ImageData,
    views: Views,
    parts: LabelledFeatures,
    seed: int,
    *,
    fractions: Sequence[float] = FINETUNED,
    lists: Sequence[Path] = (),
    settings: str = "ifnd",
    epochs: int | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    used = divide(parts, seed, "fine-tuning")
    cropping = Views(**{**views.config(), "jitter": 0.0, "grey": 0.0, "blur": 0.0, "solarise": 0.0})
    ids, labels = torch.from_numpy(used.train_ids), torch.from_numpy(used.train_y)
    test = torch.from_numpy(used.test_ids), torch.from_numpy(used.test_y)
    rows = []
    for about, (mask,) in _shares(used, fractions, lists, images.samples.keys, seed):
        found = gradient_training.finetune(
            encoder,
            images,
            cropping,
            (ids[mask], labels[mask]),
            test,
            settings,
            fraction=about["fraction"],
            epochs=epochs,
            seed=seed,
            device=best_device(),
            progress=progress,
        )
        rows.append({**about, "labels": int(mask.sum()), **asdict(found)})
    return {**_over_shares(rows), "finetuning": settings, **_sizes(used, seed)}


def _shares(
    used: LabelledFeatures,
    fractions: Sequence[float],
    lists: Sequence[Path],
    keys: Sequence[str],
    seed: int,
    draws: int = 1,
) -> Iterator[tuple[dict[str, Any], list[NDArray[np.bool_]]]]:
    """Each share of the labels, as the result describes it, with a mask of the training samples per
    draw."""
    for fraction in sorted(set(fractions), reverse=True):
        seeds = range(seed, seed + (1 if fraction == 1 else draws))
        subset = gradient_training.label_subset
        yield {"fraction": fraction}, [subset(used.train_y, fraction, each) for each in seeds]
    for path in lists:
        mask = gradient_training.read_subset(path, [keys[row] for row in used.train_ids])
        yield {"fraction": float(mask.mean()), "subset": path.stem}, [mask]


def _over_shares(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    kept = [{name: value for name, value in row.items() if value == value} for row in rows]
    names = [name for name in ("accuracy", "top5") if all(name in row for row in kept)]
    means = {name: statistics.fmean(row[name] for row in kept) for name in names}
    return {**means, "fractions": kept}


def run_transfer(
    parts: LabelledFeatures,
    seed: int,
    source: str,
    metric: str | None,
    before: Mapping[str, Any] | None = None,
    *,
    how: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Results `before` on other data sets are kept; `how`: entries about the features."""
    used = divide(parts, seed, "transfer")
    chosen: Any = metric or ("map" if used.train_y.ndim == 2 else metric_of(source))
    data = (used.train_x, used.train_y, used.test_x, used.test_y)
    found = asdict(transfer(*data, chosen, seed=seed))
    del found["held_out"]
    path = PurePath(source)
    is_file = path.suffix in (".npz", ".npy", ".csv", ".tsv", ".parquet")
    name = path.stem if is_file else path.name
    result = {"name": name, **found, **_sizes(used, seed), "data": source, **(how or {})}
    sets = [each for each in (before or {}).get("sets", []) if each.get("name") != name]
    sets = sorted([*sets, result], key=lambda each: str(each["name"]))
    return {
        "accuracy": statistics.fmean(each["accuracy"] for each in sets),
        "sets": sets,
        "measured_on": used.measured_on if len(sets) == 1 else f"{len(sets)} data sets",
    }


def run_clusters(
    parts: LabelledFeatures,
    num_clusters: int | None = None,
    seeds: Sequence[int] = SEEDS,
    normaliser: Normaliser = "arithmetic",
) -> dict[str, Any]:
    k = len(np.unique(parts.train_y)) if num_clusters is None else num_clusters
    found = nmi(parts.train_x, parts.train_y, k, seeds, normaliser)
    return {
        "nmi": found.mean,
        "deviation": found.deviation,
        "normaliser": normaliser,
        "num_clusters": k,
        "seeds": list(seeds),
        "samples": len(parts.train_y),
        "measured_on": "train split" if parts.measured_on else "all samples",
    }


# False negatives


class Augmented:
    """Stands in for the views in `embed`: one augmented view of each image."""

    def __init__(self, views: Views, seed: int, version: int) -> None:
        self.views, self.seed, self.version, self.calls = views, seed, version, 0

    def evaluate(self, pixels: Tensor, aspect: Tensor | None = None) -> Tensor:
        draw = generator(self.seed, "augmented", self.version, self.calls, device=pixels.device)
        self.calls += 1
        return self.views(pixels, draw, aspect=aspect, num_views=1)[0]


def run_kin(
    framework: Framework,
    images: ImageData,
    views: Views,
    seed: int,
    *,
    text: TextData | PairTexts | None = None,
    alpha: float | None = None,
    most_anchors: int = MOST_ANCHORS,
    progress: bool = False,
) -> dict[str, Any]:
    """Quality of the method's detection at the end of its training, and of the exact quantile, over
    all training samples with two views each, in the contrasted space.

    With `text`: of images against captions and the reverse, and the mean of both, without
    augmentation and with each sample's first caption. Without labels, false negatives are samples
    of one group, which a training never contrasts."""
    num = images.num_train
    ids, labels, truth = torch.arange(num), images.labels, "labels"
    if text is not None and (labels is None or not bool((labels[:num] >= 0).any())):
        labels, truth = text.groups, "caption groups"
    known = None if labels is None else labels[:num][labels[:num] >= 0]
    if labels is None or known is None or len(torch.unique(known)) == len(known):
        raise UsageError(
            "no two training samples share a label, so detected false negatives cannot be checked;"
            " give labelled data"
        )
    labels = labels[:num]
    anchors = draw_ids(num, most_anchors, seed, "kin-anchors")

    def embed_views(of: Preparation) -> Tensor:
        given: Any = {"device": best_device(), "progress": progress, "projected": True}
        return embed(framework, images, of, ids, **given)

    found: dict[str, Any] = {}
    if text is None:
        queries = torch.stack(
            [embed_views(Augmented(views, seed, view)) for view in range(NUM_VIEWS)], 1
        )
        others = queries
        framework.to("cpu")
        # several detectors each see a part of the embedding
        detector = framework.detectors[0] if len(framework.detectors) == 1 else None
        found = _detection(detector, queries, others, labels, alpha, anchors, progress)
    else:
        bimodal: Any = framework
        queries = embed_views(views).unsqueeze(1)
        with torch.no_grad():
            tokens = (text.draw(part, torch.zeros(len(part))) for part in torch.split(ids, 256))
            others_ND = [
                bimodal.embed_text(each.to(best_device())).float().cpu() for each in tokens
            ]
        others = torch.cat(others_ND).unsqueeze(1)
        framework.to("cpu")
        detectors = [each.detector for each in bimodal.objectives]
        detectors += [None] * (2 - len(detectors))  # SigLIP has one direction
        sides = ((queries, others), (others, queries))
        for name, detector, side in zip(bimodal.directions, detectors, sides, strict=True):
            found[name] = _detection(detector, *side, labels, alpha, anchors, progress)
        found = {**_mean_of(*found.values()), **found, "truth": truth}
    similarities = kin_similarity(queries, labels, None if text is None else others)
    few = f"{len(anchors):,} anchors against the "
    return {
        **found,
        **dict(zip(("tp_similarity", "fn_similarity", "tn_similarity"), similarities, strict=True)),
        "anchors": len(anchors),
        "samples": num,
        "views": queries.shape[1],
        "seed": seed,
        "measured_on": f"{few if len(anchors) < num else ''}train split",
    }


def _detection(
    detector: Detector | None,
    queries: Tensor,
    others: Tensor,
    labels: Tensor,
    alpha: float | None,
    anchors: Tensor,
    progress: bool,
) -> dict[str, Any]:
    """`queries`, `others`: (N, V, D) anchors and candidates."""
    parts = () if detector is None else detector.modules()
    learner = next((part for part in parts if isinstance(part, GloFND)), None)
    given = None if learner is None else learner.alpha
    share = alpha or given or ALPHA
    find = None if detector is None or detector.guide is not None else detector.find
    candidates = None if others is queries else others
    with torch.no_grad():
        found = detection_quality(
            queries, labels, share, find, anchors=anchors, candidates=candidates, progress=progress
        )
    result: dict[str, Any] = {} if found.rule is None else found.rule.metrics()
    result["exact"] = found.exact.metrics()
    if learner is not None and share == given:
        error = threshold_error(learner.thresholds[anchors], found.thresholds)
        result["threshold"] = error._asdict()
    return {**result, "alpha": share}


def _mean_of(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, Any]:
    """Figure by figure; of a figure that only the first has, that."""
    found = {}
    for name, value in one.items():
        other = two.get(name, value)
        nested = isinstance(value, Mapping)
        found[name] = _mean_of(value, other) if nested else (value + other) / 2
    return found
