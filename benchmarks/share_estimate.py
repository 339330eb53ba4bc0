"""What the audit says about the share of false negatives, beside the truth by the labels.

    .venv/bin/python benchmarks/labelled_features.py DATA CACHE
    .venv/bin/python benchmarks/share_estimate.py CACHE

For each set of features: the true share of pairs with equal labels; without labels, the share of
pairs that stands out (`Audit.outstanding`); with the labels of 100 and 200 random samples, the mean
estimate, the mean width of the 95 % interval relative to the truth, and its coverage over 400
draws. Noise of several kinds comes first; its truth is zero. The share that stands out is no
estimate of the truth: it is the same for any labels of the same samples.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from labelled_features import load

from kinfolk.auditing.similarities import ALPHAS, kin_share, kin_share_range, measure_standing_out
from kinfolk.features import Features

DRAWS = 400


def noise() -> dict[str, np.ndarray]:
    """Features without any kin."""
    random = np.random.default_rng(0)
    normal = random.normal(size=(1000, 64))
    stretched = normal * np.geomspace(1, 0.01, 64)
    mixed = np.linalg.qr(random.normal(size=(64, 64)))[0]
    components = np.linalg.svd(stretched, full_matrices=False)[2][:16]
    return {
        "noise, normal": normal,
        "noise, anisotropic": stretched,
        "noise, anisotropic after PCA": stretched @ components.T,
        "noise, heavy tails": random.standard_t(3, size=(1000, 64)),
        "noise, ReLU": np.maximum(normal, 0),
        "noise, ReLU of correlated values": np.maximum(
            normal * np.geomspace(1, 0.05, 64) @ mixed, 0
        ),
    }


def sampled(labels: np.ndarray, number: int) -> str:
    """Mean estimate, width and coverage with the labels of `number` random samples."""
    random = np.random.default_rng(number)
    truth, estimates, widths, covered = kin_share(labels), [], [], 0
    for _ in range(DRAWS):
        part = np.full(len(labels), -1)
        chosen = random.choice(len(labels), number, replace=False)
        part[chosen] = labels[chosen]
        low, high = kin_share_range(part)
        estimates.append(kin_share(part))
        widths.append(high - low)
        covered += low <= truth <= high
    width = np.mean(widths) / truth
    return f"{np.mean(estimates):.4f}, ±{width / 2:.0%}, {covered / DRAWS:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cache", type=Path)
    given = parser.parse_args()
    print(
        "| features | truth | stands out, at least | 100 labels: estimate, interval, coverage | 200"
        " labels |"
    )
    print("|---|---|---|---|---|")
    for name, features in noise().items():
        print(f"| {name} | 0 | {measure_standing_out(Features(features), ALPHAS).share:.4f} | | |")
    for name, (features, labels) in load(given.cache).items():
        stands = measure_standing_out(Features(features), ALPHAS).share
        parts = " | ".join(sampled(labels, number) for number in (100, 200))
        print(f"| {name} | {kin_share(labels):.4f} | {stands:.4f} | {parts} |", flush=True)


if __name__ == "__main__":
    main()
