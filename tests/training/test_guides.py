"""The features of a guide are matched with the training samples by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kinfolk.errors import UsageError
from kinfolk.training.guides import guide_features
from tests.report.synthetic import images


def features_of(path: Path, keys: list[str], named: bool = True) -> np.ndarray:
    x = np.random.default_rng(0).normal(size=(len(keys), 4)).astype(np.float32)
    np.save(path, x)
    if named:
        pq.write_table(pa.table({"id": range(len(keys)), "key": keys}), path.with_suffix(".parquet"))
    return x


def test_rows_in_another_order_are_matched_by_key(tmp_path: Path) -> None:
    data = images(20)
    x = features_of(tmp_path / "x.npy", list(reversed(data.samples.keys)))
    assert np.array_equal(guide_features(tmp_path / "x.npy", data).numpy(), x[::-1][: data.num_train])


def test_features_of_other_samples_are_refused(tmp_path: Path) -> None:
    data = images(20)
    features_of(tmp_path / "x.npy", [f"other/{i}.png" for i in range(20)])
    with pytest.raises(UsageError, match=r"no features of 15 of 15 training samples \(the first is animals/0000.png\)"):
        guide_features(tmp_path / "x.npy", data)


def test_without_keys_rows_are_in_order(tmp_path: Path) -> None:
    data = images(20)
    x = features_of(tmp_path / "x.npy", list(data.samples.keys), named=False)
    assert np.array_equal(guide_features(tmp_path / "x.npy", data).numpy(), x[: data.num_train])
    features_of(tmp_path / "short.npy", list(data.samples.keys)[:7], named=False)
    with pytest.raises(UsageError, match="has 7 rows"):
        guide_features(tmp_path / "short.npy", data)
