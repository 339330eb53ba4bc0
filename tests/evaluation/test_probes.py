"""The linear probe: against scikit-learn by hand, choice of strength inside the training part, odd
label sets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from kinfolk.embedding import held_out_part
from kinfolk.errors import KinfolkError
from kinfolk.evaluation.probes import linear_probe


def blobs(
    count: int, seed: int, classes: int = 3, spread: float = 2.0
) -> tuple[np.ndarray, np.ndarray]:
    centres = np.random.default_rng(0).normal(size=(classes, 20))
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, count)
    scales = np.logspace(-2, 2, 20)
    return ((centres[y] + spread * rng.normal(size=(count, 20))) * scales + 5).astype(np.float32), y


def test_equals_scikit_learn_by_hand() -> None:
    (train_x, train_y), (test_x, test_y) = blobs(200, 1), blobs(300, 2)
    for strength in (0.1, 0.001):
        scaler = StandardScaler().fit(train_x.astype(np.float64))
        model = LogisticRegression(C=1 / (strength * 200), max_iter=1000, tol=1e-6).fit(
            scaler.transform(train_x), train_y
        )
        result = linear_probe(train_x, train_y, test_x, test_y, strengths=[strength])
        assert result.accuracy == pytest.approx(
            model.score(scaler.transform(test_x), test_y), abs=0.005
        )
        assert result.strength == strength
        assert result.converged


def test_the_test_labels_have_no_say_in_the_strength() -> None:
    (train_x, train_y), (test_x, test_y) = blobs(120, 1), blobs(300, 2)
    result = linear_probe(train_x, train_y, test_x, test_y)
    shuffled = linear_probe(train_x, train_y, test_x, np.random.default_rng(3).permutation(test_y))
    assert (shuffled.strength, shuffled.held_out) == (result.strength, result.held_out)
    assert shuffled.accuracy < 0.5 < result.accuracy


def test_the_strength_is_the_best_on_the_held_out_part_and_the_stronger_in_a_tie() -> None:
    (train_x, train_y), (test_x, test_y) = blobs(120, 1), blobs(300, 2)
    result = linear_probe(train_x, train_y, test_x, test_y, strengths=[1e-4, 1e-1, 1e3])
    assert list(result.held_out) == [1e3, 1e-1, 1e-4]
    best = max(result.held_out.values())
    assert result.strength == max(
        strength for strength, accuracy in result.held_out.items() if accuracy == best
    )


def test_torch_and_numpy_and_order_agree() -> None:
    (train_x, train_y), (test_x, test_y) = blobs(120, 1), blobs(300, 2)
    result = linear_probe(train_x, train_y, test_x, test_y)
    train_x.setflags(write=False)
    train_y.setflags(write=False)
    assert linear_probe(train_x, train_y, test_x, test_y) == result
    tensors = [torch.tensor(part) for part in (train_x, train_y, test_x, test_y)]
    assert linear_probe(*tensors) == result
    order = np.random.default_rng(4).permutation(300)
    assert linear_probe(train_x, train_y, test_x[order], test_y[order]) == result


def test_held_out_part_is_stratified_and_seeded() -> None:
    y = np.array([0] * 100 + [1] * 20 + [2] * 2 + [3])
    held = held_out_part(y, 0.1, seed=0)
    assert [int(held[y == label].sum()) for label in range(4)] == [10, 2, 1, 0]
    assert np.array_equal(held, held_out_part(y, 0.1, seed=0))
    assert not np.array_equal(held, held_out_part(y, 0.1, seed=1))
    assert [int(held_out_part(y, 0.99, seed=0)[y == label].sum()) for label in range(4)] == [
        99,
        19,
        1,
        0,
    ]


def test_few_samples_of_a_class_are_enough() -> None:
    (train_x, train_y), (test_x, test_y) = blobs(60, 1, spread=0.3), blobs(60, 2, spread=0.3)
    single = np.concatenate((np.flatnonzero(train_y != 2), np.flatnonzero(train_y == 2)[:1]))
    assert linear_probe(train_x[single], train_y[single], test_x, test_y).accuracy > 0.6
    one_each = np.array([np.flatnonzero(train_y == label)[0] for label in range(3)])
    result = linear_probe(
        train_x[one_each], train_y[one_each], test_x, test_y, strengths=[1.0, 0.1, 0.01]
    )
    assert result.held_out == {}
    assert result.strength == 0.1
    assert result.accuracy > 0.5


def test_unlabelled_samples_are_left_out() -> None:
    (train_x, train_y), (test_x, test_y) = blobs(100, 1), blobs(100, 2)
    result = linear_probe(train_x, train_y, test_x, test_y)
    train = np.concatenate((train_x, test_x)), np.concatenate((train_y, np.full(100, -1)))
    test = np.concatenate((test_x, train_x)), np.concatenate((test_y, np.full(100, -1)))
    assert linear_probe(*train, *test) == result


def test_constant_features_do_no_harm() -> None:
    (train_x, train_y), (test_x, test_y) = blobs(100, 1, spread=0.3), blobs(100, 2, spread=0.3)
    train_x[:, 3], test_x[:, 3] = 4.0, 4.0
    assert linear_probe(train_x, train_y, test_x, test_y).accuracy > 0.95


def test_an_unfinished_fit_is_said_and_not_warned_of() -> None:
    (train_x, train_y), (test_x, test_y) = blobs(100, 1), blobs(100, 2)
    assert not linear_probe(
        train_x, train_y, test_x, test_y, strengths=[1e-6], max_iter=1
    ).converged


def test_a_probe_without_classes_labels_or_finite_features_is_refused() -> None:
    x, y = blobs(30, 1)
    with pytest.raises(
        KinfolkError, match=r"at least two classes, .* 30 labelled training samples"
    ):
        linear_probe(x, np.full(30, 4), x, y)
    with pytest.raises(KinfolkError, match="train part has no labelled samples"):
        linear_probe(x, np.full(30, -1), x, y)
    with pytest.raises(KinfolkError, match="test part contain values that are not finite"):
        linear_probe(x, y, x * np.nan, y)
    with pytest.raises(ValueError, match=r"`test_y` \(=\(29,\)\)"):
        linear_probe(x, y, x, y[:29])
    with pytest.raises(ValueError, match="`strengths`"):
        linear_probe(x, y, x, y, strengths=[])
    with pytest.raises(ValueError, match="`strengths`"):
        linear_probe(x, y, x, y, strengths=[0.0])
