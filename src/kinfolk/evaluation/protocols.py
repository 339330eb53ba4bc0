"""The protocols as `kinfolk eval` runs them on the encoder's features: nearest neighbours, linear probes, transfer, clusters.

Each returns what `RUN/eval/PROTOCOL.json` holds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from kinfolk.evaluation.clusters import SEEDS, Normaliser
from kinfolk.evaluation.parts import Divided, Parts, divide
from kinfolk.evaluation.subsets import ListedSubset, read_subset


def run_knn(parts: Parts, k: int, temperature: float) -> dict[str, Any]:
    """Weighted nearest neighbours, on the test split or leaving one out."""
    from kinfolk.evaluation.knn import knn_accuracy

    accuracy = knn_accuracy(parts.train_x, parts.train_y, parts.test_x, parts.test_y, k=k, temperature=temperature)
    where = "each sample by all others" if parts.test_y is None else f"{parts.test_split} split"
    tested = len(parts.train_y if parts.test_y is None else parts.test_y)
    return {"accuracy": accuracy, "k": k, "temperature": temperature, "train": len(parts.train_y), "test": tested, "measured_on": where}


def run_linear(parts: Parts, seed: int, probe: str = "lbfgs", *, progress: bool = False) -> dict[str, Any]:
    """Linear probe, on the test split or on a held-out fifth of each class."""
    from kinfolk.evaluation.gradient_probe import gradient_probe
    from kinfolk.evaluation.linear import linear_probe

    used = divide(parts, seed, "the linear probe")
    given = (used.train_x, used.train_y, used.test_x, used.test_y)
    if probe == "lbfgs":
        fitted = linear_probe(*given, seed=seed, progress=progress)
        found = {"accuracy": fitted.accuracy, **with_top5(fitted.top5), "strength": fitted.strength, "converged": fitted.converged}
    else:
        trained = gradient_probe(*given, probe, seed=seed, progress=progress)
        found = {"accuracy": trained.accuracy, **with_top5(trained.top5), "epochs": trained.epochs, "loss": trained.loss}
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
    """Linear probes on shares of the labels, or on the labels that `lists` name; `accuracy` is the mean over them, as in the column Average
    of the GloFND paper's Table 1. `keys`: of all samples, for the lists."""
    from kinfolk.evaluation.semi import semi_supervised

    used = divide(parts, seed, "the linear probe")
    given = (used.train_x, used.train_y, used.test_x, used.test_y)
    named = listed_among(used, lists, keys)
    found = semi_supervised(*given, fractions=fractions, subsets=named, draws=draws, probe=probe, seed=seed, progress=progress)
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
    """What each list names of the training part."""
    return [read_subset(path, [keys[row] for row in used.train_ids]) for path in lists]


def of_subset(name: str | None, listed: int) -> dict[str, Any]:
    """The list that labels were taken from; empty where they were drawn."""
    return {} if name is None else {"subset": name, "listed": listed}


def with_top5(share: float) -> dict[str, float]:
    """The share under its name; empty where there are too few classes for one."""
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
    """Logistic regression on one more data set; what was measured `before` on others is kept. `accuracy` is the mean over the sets. `how`:
    what else to say of the features of this one."""
    from kinfolk.evaluation.transfer import metric_of, transfer

    used = divide(parts, seed, "transfer")
    several = used.train_y.ndim == 2
    chosen: Any = metric or ("map" if several else metric_of(source))
    found = transfer(used.train_x, used.train_y, used.test_x, used.test_y, chosen, seed=seed, progress=progress)
    name = PurePath(source).stem if PurePath(source).suffix in (".npz", ".npy", ".csv", ".tsv", ".parquet") else PurePath(source).name
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
    return {"accuracy": statistics.fmean(each["accuracy"] for each in sets), "sets": sets, "measured_on": where}


def run_clusters(
    parts: Parts, num_clusters: int | None = None, seeds: Sequence[int] = SEEDS, normaliser: Normaliser = "arithmetic"
) -> dict[str, Any]:
    """Normalised mutual information of the labels and k-means clusters of the features of the training split, over several k-means."""
    from kinfolk.evaluation.clusters import nmi

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
