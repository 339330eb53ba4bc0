"""Likely label errors: precision and recall on planted errors, beside cleanlab.

    .venv/bin/python benchmarks/labelled_features.py DATA CACHE
    pip install cleanlab
    .venv/bin/python benchmarks/label_errors.py CACHE [--share 0.05]

Of each set of features 1,500 samples are taken. Once no label is changed (every listed sample is
counted as false, though some may be real errors), and once 5 % of the labels are replaced by random
other ones. cleanlab gets out-of-fold probabilities of a logistic regression (five folds) and its
defaults; if it is missing it is left out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from labelled_features import load

import kinfolk as kf

SAMPLES = 1500


def by_cleanlab(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Samples that `cleanlab.filter.find_label_issues` lists."""
    from cleanlab.filter import find_label_issues
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_predict

    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    unit = (unit - unit.mean(0)) / unit.std()
    model = LogisticRegression(C=0.1, max_iter=200)
    predicted = cross_val_predict(model, unit, labels, cv=5, method="predict_proba")
    return np.flatnonzero(find_label_issues(labels, predicted, n_jobs=1))


def cells(listed: np.ndarray, planted: np.ndarray) -> str:
    """Number listed, precision and recall."""
    hits = int(np.isin(listed, planted).sum())
    precision = f"{hits / len(listed):.2f}" if len(listed) else "–"
    return f"{len(listed)}, {precision}, {hits / len(planted):.2f}"


def measure(name: str, features: np.ndarray, labels: np.ndarray, share: float) -> None:
    """Prints one row."""
    random = np.random.default_rng(0)
    chosen = random.permutation(len(labels))[:SAMPLES]
    features, labels = features[chosen], labels[chosen]
    classes, sizes = np.unique(labels, return_counts=True)
    often = np.isin(labels, classes[sizes >= 5])  # five folds need five samples
    features, labels = features[often], np.unique(labels[often], return_inverse=True)[1]
    planted = random.permutation(len(labels))[: round(share * len(labels))]
    given = labels.copy()
    given[planted] += random.integers(1, labels.max() + 1, len(planted))
    given %= labels.max() + 1
    clean, check = (
        kf.audit(features, 0.01, labels).label_check,
        kf.audit(features, 0.01, given).label_check,
    )
    known = f"{check.accuracy:.2f}, {check.noise:.3f}, {'yes' if check.can_tell else 'no'}"
    try:
        peer = (
            f"{len(by_cleanlab(features, labels))} | {cells(by_cleanlab(features, given), planted)}"
        )
    except ModuleNotFoundError as error:
        peer = f"left out: {error} |"
    ours = f"{len(clean.found)} | {cells(check.found['sample'], planted)}"
    print(f"| {name} | {known} | {ours} | {peer} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cache", type=Path)
    parser.add_argument("--share", type=float, default=0.05)
    given = parser.parse_args()
    print(
        "| features | accuracy, noise, can tell | kinfolk: listed without errors "
        "| with errors: listed, precision, recall | cleanlab: listed without errors | with errors |"
    )
    print("|---|---|---|---|---|---|")
    for name, (features, labels) in load(given.cache).items():
        measure(name, features, labels, given.share)


if __name__ == "__main__":
    main()
