"""The audit against slow loops, and against itself where the same must come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kinfolk as kf
from kinfolk.auditing import similarities
from kinfolk.auditing.similarities import batch_line, kin_shares
from kinfolk.errors import KinfolkError, UsageError
from kinfolk.features import Features, Floats
from tests.reference import audit as reference


def clustered(
    num: int, dim: int = 6, clusters: int = 4, seed: int = 0
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, clusters, num)
    return (rng.normal(size=(clusters, dim))[labels] + 0.7 * rng.normal(size=(num, dim))).astype(
        np.float32
    ), labels


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and samples of columns so small that a few hundred samples take the way of many."""
    monkeypatch.setattr(similarities, "ROWS", 16)
    monkeypatch.setattr(similarities, "TILE_COLUMNS", 29)
    monkeypatch.setattr(similarities, "COLUMNS", 37)
    monkeypatch.setattr(similarities, "SAMPLED", 64)


@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("num", [3, 60])
def test_equals_the_slow_loops(num: int, alpha: float) -> None:
    x, labels = clustered(num)
    labels[::5] = -1
    found = kf.audit(x, alpha, labels, pairs=4)
    thresholds, kin = reference.flagged(x, alpha)
    np.testing.assert_allclose(found.thresholds, thresholds, atol=2e-6)
    assert found.flagged.tolist() == [len(row) for row in kin]
    expected = [(i, j, rank) for i, row in enumerate(kin) for rank, (j, _) in enumerate(row[:4], 1)]
    assert [
        (int(pair["anchor"]), int(pair["kin"]), int(pair["rank"])) for pair in found.pairs
    ] == expected
    np.testing.assert_allclose(
        found.pairs["similarity"], [s for row in kin for _, s in row[:4]], atol=2e-6
    )
    assert (
        found.occurrence.tolist()
        == np.bincount([j for row in kin for j, _ in row], minlength=num).tolist()
    )
    if any(kin) and num > 3:
        assert (found.precision, found.recall, found.f1) == pytest.approx(
            reference.judged(kin, labels.tolist())
        )


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("alpha", [0.005, 0.05, 0.4])
def test_floors_blocks_and_threads_change_nothing(alpha: float, workers: int) -> None:
    x, labels = clustered(333, seed=1)
    before = torch.get_num_threads()
    torch.set_num_threads(workers)
    try:
        found = kf.audit(x, alpha, labels, pairs=7)
    finally:
        torch.set_num_threads(before)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    for i, row in enumerate(unit @ unit.T):
        others = np.delete(row, i)
        level = np.quantile(others, 1 - alpha, method="inverted_cdf")
        assert found.thresholds[i] == pytest.approx(level, abs=1e-6)
        listed = found.pairs[found.pairs["anchor"] == i]
        best = np.sort(others[others > level + 1e-6])[::-1][:7]
        np.testing.assert_allclose(listed["similarity"][: len(best)], best, atol=1e-6)
    assert found.curve.num_anchors == 333


@pytest.mark.usefixtures("small_blocks")
def test_a_block_reads_all_samples_once_however_many_they_are(
    small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(similarities, "_BLOCK_ELEMENTS", 1200)  # two whole rows
    read, rows = [], Features.rows

    def count(features: Features, start: int, stop: int) -> Floats:
        read.append(stop - start)
        return rows(features, start, stop)

    monkeypatch.setattr(Features, "rows", count)
    similarities.compare_all(Features(clustered(600)[0]), 0.02, 4)
    assert 600 * 600 / 16 <= sum(read) < 2 * 600 * 600 / 16


def test_ties_and_copies_end_and_flag_no_more_than_alpha() -> None:
    x = np.tile(np.asarray([[1.0, 0.0], [0.0, 1.0]], np.float32), (120, 1))
    found = kf.audit(x, 0.05, pairs=3)
    assert (found.thresholds == 1).all()
    assert not found.flagged.any()
    assert found.num_groups("duplicate") == 2
    assert len(found.groups) == 240


def test_any_float_and_any_holder_give_the_same() -> None:
    x, _ = clustered(80)
    half = x.astype(np.float16)
    found = kf.audit(half, 0.1)
    for same in (
        half.astype(np.float32),
        half.astype(np.float64) * 1e10,
        torch.from_numpy(half.astype(np.float32)),
        half[:, ::-1],
    ):
        other = kf.audit(same, 0.1)
        np.testing.assert_allclose(other.thresholds, found.thresholds, atol=1e-6)
        assert other.pairs["kin"].tolist() == found.pairs["kin"].tolist()


def test_the_input_is_not_changed() -> None:
    x, labels = clustered(50)
    before = x.copy()
    x.flags.writeable = False
    kf.audit(x, 0.1, labels)
    assert np.array_equal(x, before)


def test_labels_by_name_and_unknown_ones() -> None:
    x, labels = clustered(60)
    names = [None if i % 7 == 0 else f"class {label}" for i, label in enumerate(labels)]
    numbers = np.where(np.arange(60) % 7 == 0, -1, labels)
    one, two = kf.audit(x, 0.1, names), kf.audit(x, 0.1, numbers)
    assert (one.precision, one.recall, one.f1) == (two.precision, two.recall, two.f1)
    assert one.classes == [f"class {i}" for i in range(4)]


def test_without_labels_nothing_is_counted_as_right_or_wrong() -> None:
    found = kf.audit(clustered(50)[0], 0.1)
    assert np.isnan([found.precision, found.recall, found.f1, found.kin_share]).all()
    assert found.best_alpha is None
    assert found.curve.points == ()


def test_batches_go_by_the_labels_and_are_no_larger_than_the_data() -> None:
    x, _ = clustered(20)
    found = kf.audit(x, 0.1, [0] * 15 + [1] * 4 + [-1])
    assert found.labels is not None
    assert [line.batch_size for line in found.batches] == [20]
    shares = [14 / 18] * 15 + [3 / 18] * 4
    line = batch_line(kin_shares(found.labels, 0.0), 5, views=2)
    assert found.kin_share == pytest.approx(np.mean(shares))
    assert line.negatives == 8
    assert line.per_anchor == pytest.approx(8 * found.kin_share)
    assert line.chance == pytest.approx(np.mean([1 - (1 - share) ** 4 for share in shares]))
    (whole,) = kf.audit(x, 0.1).batches
    assert whole.batch_size == 20
    assert whole.per_anchor == 0, "too few samples to see what stands out"


@pytest.mark.parametrize(
    ("features", "arguments", "words"),
    [
        (np.zeros((2, 3), np.float32), {}, "at least 3 samples and one feature"),
        (np.ones(5, np.float32), {}, r"must have the shape \(samples, features\)"),
        (np.ones((5, 0), np.float32), {}, "at least 3 samples and one feature"),
        (np.ones((5, 3), np.int64), {}, "must be float16, float32 or float64"),
        (np.ones((5, 3)), {"alpha": 0}, r"`alpha` \(=0\) must be in \(0, 1\)"),
        (np.ones((5, 3)), {"alpha": 1.0}, r"`alpha` \(=1.0\)"),
        (np.ones((5, 3)), {"alpha": float("nan")}, r"`alpha` \(=nan\)"),
        (
            np.ones((5, 3)),
            {"labels": [1, 2]},
            r"`labels` \(=2 labels\) must be as many as the samples \(=5\)",
        ),
        (np.ones((5, 3)), {"labels": np.zeros((5, 2))}, "one label for each sample"),
        (np.ones((5, 3)), {"pairs": 0}, r"`pairs` \(=0\) must be at least 1"),
        (np.ones((5, 3)), {"keys": ["a"]}, "`keys`"),
    ],
)
def test_wrong_arguments_of_an_audit_are_named(
    features: Any, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        kf.audit(features, **arguments)


@pytest.mark.parametrize(
    ("value", "words"),
    [(np.nan, "NaN or infinite"), (np.inf, "NaN or infinite"), (0.0, "all zero")],
)
def test_bad_rows_are_counted_and_the_first_is_named(value: float, words: str) -> None:
    x, _ = clustered(20)
    x[[4, 9]] = value
    with pytest.raises(KinfolkError, match=rf"2 of 20 rows \(the first is row 4\) .* {words}"):
        kf.audit(x)


def test_save_writes_tables_summary_and_page(tmp_path: Path) -> None:
    import json

    import pyarrow.csv as pc
    import pyarrow.parquet as pq

    x, labels = clustered(90)
    x[7] = x[3]
    found = kf.audit(x, 0.1, labels, pairs=3, keys=[f"{i}.png" for i in range(90)])
    out = found.save(tmp_path / "deep" / "audit")
    pairs = pq.read_table(out / "pairs.parquet")
    assert pairs.column_names == ["anchor", "kin", "similarity", "rank", "anchor_key", "kin_key"]
    assert pairs["kin_key"].to_pylist() == [f"{i}.png" for i in found.pairs["kin"]]
    for name in ("groups", "hubs", "mislabels"):
        assert "key" in pc.read_csv(out / f"{name}.csv").column_names, name
    assert "key" in pq.read_table(out / "thresholds.parquet").column_names
    assert (
        pairs["kin"].to_pylist()
        == found.pairs["kin"].tolist()
        == pc.read_csv(out / "pairs.csv")["kin"].to_pylist()
    )
    thresholds = pq.read_table(out / "thresholds.parquet")
    assert thresholds["threshold"].to_numpy().tolist() == found.thresholds.tolist()
    assert pc.read_csv(out / "groups.csv")["sample"].to_pylist()[:2] == [3, 7]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["f1"] == found.f1
    assert (out / "audit.html").stat().st_size > 100_000
    detector = kf.Known(num_samples=90, pairs=str(out / "pairs.parquet"), symmetric=False)
    assert detector.kin_P.sort().values.tolist() == sorted(found.pairs["kin"].tolist())
    other = kf.audit(x[8:], 0.1)
    other.save(out)
    assert pq.read_table(out / "pairs.parquet").column_names == [
        "anchor",
        "kin",
        "similarity",
        "rank",
    ], "no keys were given"
    with pytest.raises(
        UsageError, match=r"has the pairs of 82 samples, but there are 90 training samples"
    ):
        kf.Known(num_samples=90, pairs=str(out / "pairs.parquet"))
    assert not (out / "mislabels.csv").exists(), "that of an earlier audit does not stay"
    assert not list(out.glob("*.partial"))


def test_keys_are_no_formulas_in_csv_files(tmp_path: Path) -> None:
    import csv

    x, _ = clustered(20)
    out = kf.audit(
        x, 0.2, keys=["=1+1", "undecodable-\udce9.jpg", *(f"{i}.png" for i in range(18))]
    ).save(tmp_path)
    with (out / "pairs.csv").open(newline="") as file:
        keys = {row["anchor_key"] for row in csv.DictReader(file)}
    assert "=1+1" not in keys
    assert "\\=1+1" in keys
