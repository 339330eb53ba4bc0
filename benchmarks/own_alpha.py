"""Does a share α_i for each sample, by the shape of its similarities, find more false negatives
than one α for all?

    .venv/bin/python benchmarks/own_alpha.py FEATURES.npy …

Each file as `kinfolk embed` writes it, with its labels beside it as .parquet. F1 of the flagged
pairs against the labels, both rules flagging the same share of all pairs; also for a part of the
samples whose classes have unequal sizes, the smallest a thirtieth of the largest, or of less than
eleven classes each 0.7 times the one before.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kinfolk.auditing.alpha import take_survey
from kinfolk.auditing.annotations import encode, read_labels
from kinfolk.auditing.inputs import Features

ALPHAS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1)


def unequal(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ids of the samples that are left."""
    classes, sizes = np.unique(labels[labels >= 0], return_counts=True)
    factor = max(0.7, (1 / 30) ** (1 / max(1, len(classes) - 1)))
    rng = np.random.default_rng(0)
    kept = [
        rng.choice(
            np.flatnonzero(labels == each),
            max(2, round(int(sizes.min()) * factor**i)),
            replace=False,
        )
        for i, each in enumerate(classes)
    ]
    return np.sort(np.concatenate(kept))


def line(name: str, features: NDArray[np.float32], labels: NDArray[np.int64]) -> str:
    """A row of the table: one α / by sample, for each α."""
    curve = take_survey(Features(features), ALPHAS[0], labels).curve
    f1 = {(point.rule, point.alpha): point.f1 for point in curve}
    cells = [f"{f1['one α', alpha]:.4f} / {f1['α by sample', alpha]:.4f}" for alpha in ALPHAS]
    return f"| {name}, {len(labels):,} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("features", nargs="+", type=Path)
    print(
        f"| features, samples | {' | '.join(f'α = {alpha}' for alpha in ALPHAS)}"
        f" |\n|---{'|---' * len(ALPHAS)}|"
    )
    for path in parser.parse_args().features:
        features = np.load(path, mmap_mode="r")
        labels, _ = encode(read_labels(path.with_suffix(".parquet")).values, len(features))
        print(line(path.stem, features, labels), flush=True)
        kept = unequal(labels)
        print(line(f"{path.stem}, unequal classes", features[kept], labels[kept]), flush=True)


if __name__ == "__main__":
    main()
