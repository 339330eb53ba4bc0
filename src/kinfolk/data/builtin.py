"""Data that comes along: scikit-learn's handwritten digits, no download."""

from __future__ import annotations

import numpy as np

from kinfolk.data.arrays import ArraySource, array_source


def digits() -> ArraySource:
    """1,797 handwritten digits, 8 × 8, 10 classes; every fifth picture of each class is for testing.

    Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI 1998; the copy in scikit-learn.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    labels = bunch.target.astype(np.int64)
    is_test = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        is_test[np.flatnonzero(labels == label)[4::5]] = True
    splits = {"train": (images[~is_test], labels[~is_test]), "test": (images[is_test], labels[is_test])}
    return array_source(splits, name="digits", classes=[str(label) for label in range(10)])
