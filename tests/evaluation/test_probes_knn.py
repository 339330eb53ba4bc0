"""Weighted nearest neighbours against a slow loop, and the degenerate cases."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kinfolk.errors import KinfolkError
from kinfolk.evaluation import probes
from kinfolk.evaluation.probes import knn_accuracy


def slow(
    train_x: list[list[float]],
    train_y: list[int],
    test_x: list[list[float]] | None,
    k: int,
    temperature: float,
) -> list[int]:
    """The vote, sample by sample."""

    def cosine(a: list[float], b: list[float]) -> float:
        return (
            sum(p * q for p, q in zip(a, b, strict=True))
            / math.sqrt(sum(p * p for p in a))
            / math.sqrt(sum(q * q for q in b))
        )

    predicted = []
    for row, x in enumerate(train_x if test_x is None else test_x):
        others = [
            i for i in range(len(train_x)) if train_y[i] >= 0 and (test_x is not None or i != row)
        ]
        nearest = sorted(((cosine(x, train_x[i]), train_y[i]) for i in others), reverse=True)[:k]
        votes: dict[int, float] = {}
        for similarity, label in nearest:
            votes[label] = votes.get(label, 0.0) + math.exp(similarity / temperature)
        predicted.append(max(votes, key=lambda label: votes[label]))
    return predicted


def blobs(count: int, seed: int, spread: float = 1.5) -> tuple[Tensor, Tensor]:
    centres = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (count,), generator=generator)
    return centres[y] + spread * torch.randn(count, 6, generator=generator), y


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.1), (5, 0.1), (20, 0.07), (20, 1.0)])
def test_knn_in_blocks_equals_a_slow_loop(
    k: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # several blocks, the last one short
    monkeypatch.setattr(probes, "_BLOCK_ELEMENTS", {"cpu": 7 * 60})
    (train_x, train_y), (test_x, test_y) = blobs(60, 1), blobs(31, 2)
    expected = slow(train_x.tolist(), train_y.tolist(), test_x.tolist(), k, temperature)
    assert knn_accuracy(train_x, train_y, test_x, torch.tensor(expected), k, temperature) == 1
    right = sum(a == b for a, b in zip(expected, test_y.tolist(), strict=True)) / 31
    assert 0.2 < right < 1
    assert knn_accuracy(train_x, train_y, test_x, test_y, k, temperature) == pytest.approx(right)
    alone = slow(train_x.tolist(), train_y.tolist(), None, k, temperature)
    right = sum(a == b for a, b in zip(alone, train_y.tolist(), strict=True)) / 60
    assert knn_accuracy(train_x, train_y, k=k, temperature=temperature) == pytest.approx(right)


def test_order_length_and_container_change_nothing() -> None:
    (train_x, train_y), (test_x, test_y) = blobs(80, 1), blobs(40, 2)
    accuracy = knn_accuracy(train_x, train_y, test_x, test_y)
    order = torch.randperm(80, generator=torch.Generator().manual_seed(5))
    assert knn_accuracy(train_x[order], train_y[order], test_x, test_y) == accuracy
    order = torch.randperm(40, generator=torch.Generator().manual_seed(6))
    assert knn_accuracy(train_x, train_y, test_x[order], test_y[order]) == accuracy
    lengths = torch.rand(80, 1, generator=torch.Generator().manual_seed(7)) + 0.1
    assert knn_accuracy(train_x * lengths, train_y, test_x * 7, test_y) == accuracy
    arrays: Any = [part.numpy() for part in (train_x, train_y, test_x, test_y)]
    assert knn_accuracy(*arrays) == accuracy
    for array in arrays:
        array.setflags(write=False)  # as arrays of a mapped file or a table are
    assert knn_accuracy(*arrays) == accuracy
    assert knn_accuracy(train_x, train_y * 1000 + 3, test_x, test_y * 1000 + 3) == accuracy


def test_itself_is_not_among_its_neighbours() -> None:
    x, y = torch.eye(4), torch.arange(4)
    assert knn_accuracy(x, y) == 0.0
    assert knn_accuracy(x, y, x, y, k=1) == 1.0


def test_unlabelled_samples_neither_vote_nor_count() -> None:
    (train_x, train_y), (test_x, test_y) = blobs(60, 1), blobs(30, 2)
    accuracy = knn_accuracy(train_x, train_y, test_x, test_y)
    more_train, more_test = torch.cat((test_x, train_x)), torch.cat((train_x, test_x))
    none_train, none_test = torch.full((30,), -1), torch.full((60,), -1)
    got = knn_accuracy(
        more_train, torch.cat((none_train, train_y)), more_test, torch.cat((none_test, test_y))
    )
    assert got == accuracy


def test_k_beyond_the_voters_means_all() -> None:
    (train_x, train_y), (test_x, test_y) = blobs(15, 1), blobs(30, 2)
    assert knn_accuracy(train_x, train_y, test_x, test_y, k=500) == knn_accuracy(
        train_x, train_y, test_x, test_y, k=15
    )
    assert knn_accuracy(train_x, train_y, k=500) == knn_accuracy(train_x, train_y, k=14)


def test_a_small_temperature_is_the_nearest_neighbour() -> None:
    (train_x, train_y), (test_x, test_y) = blobs(60, 1), blobs(30, 2)
    assert knn_accuracy(train_x, train_y, test_x, test_y, 20, 1e-6) == knn_accuracy(
        train_x, train_y, test_x, test_y, k=1
    )


def test_zero_vectors_and_half_precision_do_no_harm() -> None:
    (train_x, train_y), (test_x, test_y) = blobs(60, 1, 0.1), blobs(30, 2, 0.1)
    train_x[0] = 0
    assert knn_accuracy(train_x.bfloat16(), train_y, test_x.bfloat16(), test_y) == 1.0


def test_a_class_that_training_lacks_is_wrong() -> None:
    x = torch.eye(2)
    assert knn_accuracy(x, torch.tensor([0, 1]), x, torch.tensor([0, 7]), k=1) == 0.5


def test_knn_without_labels_neighbours_or_finite_features_is_refused() -> None:
    x, y = blobs(10, 1)
    with pytest.raises(KinfolkError, match="train part has no labelled samples"):
        knn_accuracy(x, torch.full((10,), -1))
    with pytest.raises(KinfolkError, match="test part has no labelled samples"):
        knn_accuracy(x, y, x, torch.full((10,), -1))
    with pytest.raises(KinfolkError, match="at least two"):
        knn_accuracy(x[:1], y[:1])
    with pytest.raises(KinfolkError, match="not finite"):
        knn_accuracy(x / 0, y)
    with pytest.raises(ValueError, match="given together"):
        knn_accuracy(x, y, x)
    with pytest.raises(ValueError, match=r"`k` \(=0\)"):
        knn_accuracy(x, y, k=0)
    with pytest.raises(ValueError, match=r"`temperature` \(=0\)"):
        knn_accuracy(x, y, temperature=0)
    with pytest.raises(ValueError, match=r"`train_y` \(=\(9,\)\)"):
        knn_accuracy(x, y[:9])
