"""Options of RCL: the paper's settings as printed, what has no effect, where keys come from, and
what is counted of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kinfolk.detectors import Hierarchy
from kinfolk.frameworks import RCL
from tests.frameworks.test_rcl import LABELS, NUM_SAMPLES, batch, clustered, everybody, made


def test_label_propagation_is_gone() -> None:
    for build in (
        lambda: made(rule="propagation"),
        lambda: Hierarchy(num_samples=8, rule="propagation"),  # type: ignore[call-arg]
    ):
        with pytest.raises(TypeError, match="rule"):
            build()


def test_radii_and_numbers_of_clusters_are_those_of_the_paper() -> None:
    """Three of each need four criteria, because under the first every sample is its own cluster."""
    framework = made(radii=(0.6, 0.7, 0.8))
    assert framework.num_criteria == 4
    assert framework.criteria.hierarchy.radii.values == (0.6, 0.7, 0.8)
    framework = made(hierarchy="kmeans", num_clusters=(32, 16, 8), warmup_epochs=0)
    framework.refresh(everybody(), 0.0)
    assert [len(level.unique()) for level in framework.labels] == [NUM_SAMPLES, 32, 16, 8]
    assert Hierarchy(num_samples=8, radii=(0.6, 0.7, 0.8)).clusters.levels == 4


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"radii": (0.6, 0.7, 0.8), "criteria": 3}, "one for each of the levels 2 to 3"),
    (
        {"hierarchy": "kmeans", "num_clusters": (32, 16, 8), "criteria": 3},
        r"one number below 40 for each of the criteria 2 to 3",
    ),
    ({"num_clusters": (20, 5)}, "`num_clusters` .* has no effect"),
    ({"hierarchy": "dbscan", "num_clusters": (20, 5)}, "`num_clusters` .* has no effect"),
    ({"hierarchy": "kmeans", "radii": (0.4, 0.9)}, "`radii` .* has no effect"),
    ({"hierarchy": "kmeans", "merge_similarity": 0.5}, "`merge_similarity` .* has no effect"),
    ({"hierarchy": "dbscan", "parts": 4}, "`parts` .* has no effect"),
    ({"every": 2}, "`every` .* has no effect"),
    ({"criteria": 1, "num_keys": 2}, "`num_keys` .* has no effect"),
    ({"criteria": 1, "own_key": False}, "`own_key` .* has no effect"),
    ({"criteria": 1, "radii": ()}, "`radii` .* has no effect"),
    ({"criteria": 1, "retrieval": "each"}, "`retrieval` .* has no effect"),
    ({"criteria": 1, "hierarchy": "kmeans"}, "`hierarchy` .* has no effect"),
    ({"criteria": 1, "shared_predictor": True}, "`shared_predictor` .* has no effect"),
    ({"num_keys": 0}, "`num_keys` .* must be at least 1"),
    ({"criteria": 0}, "`criteria` .* must be at least 1"),
]


def test_what_has_no_effect_or_does_not_fit_is_refused() -> None:
    for wrong, words in REFUSED:
        with pytest.raises(ValueError, match=words):
            made(**wrong)


def retrieved(framework: RCL) -> tuple[Any, Any, Any]:
    """Ids of anchors, keys and (A, H, K) whether they are positive, of a queue that holds every
    other sample."""
    ids, support_ids = torch.arange(NUM_SAMPLES), torch.arange(0, NUM_SAMPLES, 2)
    keys = everybody()
    found, same = framework.retrieve(keys, ids, keys[support_ids], support_ids)
    near = (found.flatten(0, 1) @ keys.T).argmax(1).view(found.shape[:2])
    return ids, near, same


def test_each_criterion_retrieves_keys_from_its_own_clusters() -> None:
    framework = clustered(retrieval="each", num_keys=2)
    ids, key_ids, same = retrieved(framework)
    assert key_ids.shape == (NUM_SAMPLES, 1 + 2 * 2), (
        "the other view, and two keys of each of the criteria 2 and 3"
    )
    labels = framework.labels
    there = same[:, 0, 1:] >= 0
    assert (labels[2][ids].unsqueeze(1) == labels[2][key_ids[:, 1:3]])[there[:, :2]].all(), (
        "of the last criterion"
    )
    assert (labels[1][ids].unsqueeze(1) == labels[1][key_ids[:, 3:]])[there[:, 2:]].all(), (
        "of the second criterion"
    )
    assert there.any(0).all()


def test_without_the_own_view_it_is_a_key_only_where_none_is_retrieved() -> None:
    framework = clustered(own_key=False)
    _, _, same = retrieved(framework)
    own, other = same[:, 0, 0], same[:, 0, 1]
    assert ((own >= 0) != (other >= 0)).all()
    assert (other >= 0).any()
    loss = framework(*batch(0))
    assert loss.isfinite()
    loss.backward()


def test_the_step_counts_anchors_with_a_key_and_keys_of_the_same_label() -> None:
    framework = clustered()
    framework.set_eval_labels(LABELS)
    ids, key_ids, same = retrieved(framework)
    shares = {name: counts.tolist() for name, counts in framework.step_shares.items()}
    there, right = same[:, 0, 1] >= 0, LABELS[key_ids[:, 1]] == LABELS[ids]
    assert shares["with_key"] == [int(there.sum()), NUM_SAMPLES]
    assert shares["key_precision"] == [int((there & right).sum()), int(there.sum())]


def test_a_missing_key_does_not_count_as_a_dissimilar_positive() -> None:
    framework = clustered()
    keys = everybody()
    found, same = framework.retrieve(keys, torch.arange(40), keys[:1], torch.tensor([0]))
    missing = same[:, 0, 1] < 0
    assert missing.any()
    torch.testing.assert_close(found[missing, 1], keys[missing])
