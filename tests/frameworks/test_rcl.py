"""RCL and NNCLR equal the loops over their equations, step after step; keys, criteria, state, and
what they are without."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kinfolk.clustering import conforming
from kinfolk.detectors import IFND, GloFND, Hierarchy, Oracle
from kinfolk.errors import KinfolkWarning
from kinfolk.frameworks import NNCLR, RCL, MoCo
from tests.cover import pairwise
from tests.reference import queues, relative

NUM_SAMPLES, BATCH, T, DIM = 40, 4, 0.3, 5
LABELS = torch.arange(NUM_SAMPLES) % 4


def made(kind: type[NNCLR | RCL] = RCL, queue_size: int = 14, **more: Any) -> Any:
    torch.manual_seed(0)
    encoder, head = (
        nn.Sequential(nn.Flatten(), nn.Linear(12, 10), nn.LayerNorm(10), nn.ReLU()),
        nn.Linear(10, DIM),
    )
    arguments: dict[str, Any] = {"momentum": 0.9, "predictor_size": 8, "temperature": T, **more}
    return kind(encoder, head, NUM_SAMPLES, queue_size=queue_size, **arguments).double()


def batch(step: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    """Views and ids; samples come again after few steps, so that their old keys are in the
    queue."""
    g = torch.Generator().manual_seed(step)
    return (
        torch.randn(2, size, 3, 2, 2, dtype=torch.float64, generator=g),
        torch.randperm(10, generator=g)[:size],
    )


def everybody() -> Tensor:
    """Embeddings of all samples in few clusters."""
    g = torch.Generator().manual_seed(9)
    centres = torch.randn(4, DIM, generator=g, dtype=torch.float64)
    return F.normalize(
        centres[LABELS] + 0.3 * torch.randn(NUM_SAMPLES, DIM, generator=g, dtype=torch.float64),
        dim=1,
    )


def clustered(**more: Any) -> Any:
    radii = {} if more.get("hierarchy") == "kmeans" else {"radii": (0.4, 0.9)}
    framework = made(**{"warmup_epochs": 0, **radii, **more})
    framework.refresh(everybody(), 0.0)
    return framework


def step_of(framework: Any, views: Tensor) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Predictions of each row for each criterion, and the rows' keys; rows are both views of the
    first sample, then of the second, …"""
    rows = torch.stack((views[0], views[1]), 1).flatten(0, 1)
    projected = framework.head(framework.encoder(rows))
    each = [predict(projected) for predict in framework.predictors]
    predictions = [[q[row] for q in each] for row in range(len(projected))]
    keys = framework.slow(torch.stack((views[1], views[0]), 1).flatten(0, 1))
    return predictions, [key / key.norm() for key in keys]


def compared(framework: Any, keys_of: Any, steps: int = 4) -> None:
    """Loss and gradient of some steps against loops; `keys_of(row, key, id, queue)` says what is
    retrieved."""
    trained = [p for p in framework.parameters() if p.requires_grad]
    optimizer, queue = torch.optim.SGD(trained, lr=0.1), list[tuple[Tensor, int]]()
    for step in range(steps):
        views, ids = batch(step)
        rows, number = (
            [int(i) for i in ids.repeat_interleave(2)],
            framework.num_criteria if isinstance(framework, RCL) else 1,
        )
        predictions, keys = step_of(framework, views)
        # one predictor for all criteria
        predictions = [mine * (number // len(mine)) for mine in predictions]
        held, held_ids = framework.queue.entries()
        entering = list(zip(keys, rows, strict=True))
        support = [(v.clone(), int(i)) for v, i in zip(held, held_ids, strict=True)] or entering
        wanted = [
            keys_of(row, key, i, support)
            for row, (key, i) in enumerate(zip(keys, rows, strict=True))
        ]
        slow = relative.rcl(predictions, wanted, rows, support, T)
        expected = torch.autograd.grad(slow, trained)
        optimizer.zero_grad()
        loss = framework(views, ids)
        loss.backward()
        torch.testing.assert_close(loss, slow)
        torch.testing.assert_close([p.grad for p in trained], list(expected))
        queue = queues.pushed(queue, framework.queue.size, entering)
        assert sorted(framework.queue.entries()[1].tolist()) == sorted(i for _, i in queue)
        optimizer.step()
        framework.after_step()


@pytest.mark.parametrize("queue_size", [5, 14])
def test_nnclr_is_the_loss_with_the_nearest_as_the_positive(queue_size: int) -> None:
    compared(
        made(NNCLR, queue_size),
        lambda row, key, i, queue: [(relative.nearest(key, i, queue), [True])],
    )


def test_before_there_are_clusters_it_is_equation_1() -> None:
    compared(made(criteria=3), lambda row, key, i, queue: [(key, [True] * 3)], steps=3)


@pytest.mark.parametrize(
    ("shared", "hierarchy", "num_keys"),
    pairwise([False, True], ["online", "kmeans", "dbscan"], [1, 3]),
)
def test_rcl_is_equations_2_and_3(hierarchy: str, shared: bool, num_keys: int) -> None:
    """Keys are checked to be of the cluster and then taken from the framework: chance chooses among
    them."""
    framework = clustered(
        criteria=3, hierarchy=hierarchy, shared_predictor=shared, num_keys=num_keys
    )
    several = set[int]()

    def keys_of(
        row: int, key: Tensor, i: int, queue: relative.Entries
    ) -> list[tuple[Tensor, list[bool]]]:
        labels = framework.labels
        mates = [
            place for place, (_, j) in enumerate(queue) if j != i and labels[-1, j] == labels[-1, i]
        ]
        ids, held = torch.full((2 * BATCH,), i), torch.tensor([j for _, j in queue])
        found, same = framework.retrieve(
            torch.stack([key] * 2 * BATCH), ids, torch.stack([v for v, _ in queue]), held
        )
        retrieved = [
            vector
            for vector, agree in zip(found[row, 1:], same[row, 0, 1:], strict=True)
            if agree >= 0
        ]
        assert len(retrieved) == min(num_keys, len(mates))
        chosen = [
            next(place for place in mates if torch.equal(queue[place][0], vector))
            for vector in retrieved
        ]
        several.update(
            len(set(labels[:, queue[place][1]].eq(labels[:, i]).tolist())) for place in chosen
        )
        return [
            (key, [True] * 3),
            *(
                (queue[p][0], [bool(level[queue[p][1]] == level[i]) for level in labels])
                for p in chosen
            ),
        ]

    compared(framework, keys_of)
    assert several == {2}, (
        "every retrieved key is positive under the last criterion and negative under the first"
    )


def test_one_criterion_without_a_predictor_is_moco_both_ways() -> None:
    framework = made(criteria=1)
    torch.manual_seed(0)
    moco = MoCo(framework.encoder, framework.head, NUM_SAMPLES, 14, 0.9, T, symmetric=True).double()
    framework.predictors[0] = nn.Identity()
    for step in range(4):
        torch.testing.assert_close(framework(*batch(step)), moco(*batch(step)))


def test_the_hierarchy_is_refined_with_every_step_and_stays_nested() -> None:
    framework = clustered(criteria=3)
    before = framework.labels
    for step in range(6):
        framework(*batch(step))
        assert conforming(framework.labels) == 1
    known = framework.criteria.hierarchy.clusters.tree.features
    assert not torch.equal(framework.labels, before)
    assert not torch.allclose(known[:10], everybody()[:10]), (
        "the features of the samples met are new"
    )
    torch.testing.assert_close(known[10:], everybody()[10:])


def test_metrics_are_those_of_the_current_levels() -> None:
    assert made(NNCLR).metrics == made(criteria=1).metrics == made().metrics == {}
    assert clustered().metrics["conforming"] == 1
    offline = clustered(hierarchy="kmeans", num_clusters=(20, 7))
    assert offline.metrics["conforming"] == conforming(offline.labels) < 1
    size = offline.labels[-1].bincount()
    assert offline.metrics["largest_cluster"] == size.max() / NUM_SAMPLES
    assert offline.metrics["clustered"] == pytest.approx(size[size > 1].sum().item() / NUM_SAMPLES)


def test_offline_levels_wait_for_the_next_refresh() -> None:
    framework = clustered(criteria=3, hierarchy="kmeans", num_clusters=(20, 5), every=2)
    before = framework.labels
    assert [framework.due(epoch) for epoch in range(4)] == [True, False, True, False]
    framework(*batch(0))
    assert torch.equal(framework.labels, before)
    assert [len(level.unique()) for level in before] == [NUM_SAMPLES, 20, 5]


def test_the_clustering_is_due_after_the_warm_up() -> None:
    online = made(warmup_epochs=2)
    assert [online.due(epoch) for epoch in range(4)] == [False, False, True, False]
    assert online.labels is None
    assert [made(warmup_epochs=2, hierarchy="dbscan").due(epoch) for epoch in range(4)] == [
        False,
        False,
        True,
        True,
    ]
    assert not any(made(criteria=1).due(epoch) for epoch in range(12))
    with pytest.warns(
        KinfolkWarning, match=r"`warmup_epochs` \(=2\) is as long as the training \(=2 epochs\)"
    ):
        online.set_progress(0, 2)


def test_a_detector_that_collects_features_is_refreshed_next_to_the_criteria() -> None:
    detector = IFND(num_samples=NUM_SAMPLES, num_clusters=(3,), source="bank", schedule="constant")
    framework = made(warmup_epochs=1, radii=(0.4, 0.9), detector=detector).float()
    for epoch, collects in ((0, True), (1, False), (2, True)):
        framework.set_progress(epoch, 3)
        assert framework.collects is collects
        if epoch and framework.due(epoch):
            framework.refresh(None if collects else everybody().float(), epoch / 3)
        views, ids = batch(epoch)
        framework(views.float(), ids)
    assert framework.labels is not None
    assert detector.clusters.refreshed


@pytest.mark.parametrize("action", ["eliminate", "attract", "reweight"])
@pytest.mark.parametrize("kind", ["nnclr", "rcl"])
def test_a_detector_speaks_of_the_queue(kind: str, action: Any) -> None:
    more = {"detector": Oracle(LABELS), "action": action}
    framework = made(NNCLR, **more) if kind == "nnclr" else clustered(**more)
    framework.set_eval_labels(LABELS)
    plain = made(NNCLR) if kind == "nnclr" else clustered()
    assert framework(*batch(0)).item() != plain(*batch(0)).item()
    assert framework.stats.precision == framework.stats.recall == 1


def test_the_gradient_is_right() -> None:
    framework = clustered(detector=Oracle(LABELS), action="reweight").eval()
    framework.queue.push(F.normalize(torch.randn(20, DIM), dim=1), torch.arange(20))
    views, ids = batch(1, size=2)
    keys = framework.slow(torch.stack((views[1], views[0]), 1).flatten(0, 1))
    framework.slow.forward = lambda images: keys  # whose gradient is stopped
    assert torch.autograd.gradcheck(lambda x: framework(x, ids), (views.requires_grad_(),))


def test_evaluation_writes_nothing() -> None:
    framework = clustered(detector=GloFND(num_samples=NUM_SAMPLES, alpha=0.2))
    framework(*batch(0))
    before = {name: value.clone() for name, value in framework.state_dict().items()}
    framework.eval()
    framework(*batch(1))
    assert all(torch.equal(value, before[name]) for name, value in framework.state_dict().items())


def test_a_broken_step_leaves_no_trace() -> None:
    framework = clustered()
    framework.predictors = nn.ModuleList(nn.Linear(DIM, DIM).double() for _ in range(3))
    framework(*batch(0))
    before = {name: value.clone() for name, value in framework.state_dict().items()}
    views, ids = batch(1)
    views[0, 2] = torch.nan
    assert framework(views, ids).isnan()
    assert all(torch.equal(value, before[name]) for name, value in framework.state_dict().items())


@pytest.mark.parametrize("radii", [(0.4, 0.9), None])
@pytest.mark.parametrize("hierarchy", ["online", "dbscan"])
def test_the_state_loads_strictly_and_goes_on(
    hierarchy: str, radii: tuple[float, ...] | None
) -> None:
    one, other = (
        clustered(hierarchy=hierarchy, radii=radii),
        made(warmup_epochs=0, radii=radii, hierarchy=hierarchy),
    )
    for step in range(3):
        one(*batch(step))
        one.after_step()
    other.load_state_dict(one.state_dict())
    for step in (3, 4):
        assert torch.equal(one(*batch(step)), other(*batch(step)))
    assert all(
        torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items()
    )
    assert {
        "queue.ids",
        "slow.head.weight",
        "chance.count",
        "predictors.2.0.weight",
    } <= one.state_dict().keys()


def test_a_queue_not_smaller_than_the_data_is_warned_of() -> None:
    with pytest.warns(KinfolkWarning, match=r"not smaller than the data set \(=40 samples\)"):
        made(queue_size=NUM_SAMPLES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(queue_size=NUM_SAMPLES - 1)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"queue_size": 0}, r"`queue_size` \(=0\) must be at least 1"),
    ({"criteria": 0}, r"`criteria` \(=0\) must be at least 1"),
    ({"num_keys": 0}, r"`num_keys` \(=0\) must be at least 1"),
    ({"hierarchy": "tree"}, r"`hierarchy` \(='tree'\) must be one of online, kmeans, dbscan"),
    ({"retrieval": "all"}, r"`retrieval` \(='all'\) must be one of hierarchy, each"),
    (
        {"hierarchy": "kmeans", "num_clusters": (5,), "criteria": 3},
        (
            r"`num_clusters` \(=\[5\]\) must be one number below 40 for each of the criteria 2"
            r" to 3"
        ),
    ),
    (
        {"hierarchy": "kmeans", "num_clusters": (5, 5)},
        r"`num_clusters` \(=\[5, 5\]\) must be falling from one level to the next$",
    ),
    (
        {"hierarchy": "kmeans", "criteria": 9},
        r"`num_clusters` \(=\[32, 16, 8, 4, 2, 1, 0, 0\]\) must be one number below 40",
    ),
    (
        {"radii": (0.7, 0.7)},
        r"`radii` \(=\[0\.7, 0\.7\]\) must be above 0 and grow from one level to the next$",
    ),
    (
        {"radii": (-0.2, 0.7), "hierarchy": "dbscan"},
        r"`radii` \(=\[-0\.2, 0\.7\]\) must be above 0",
    ),
    ({"radii": (0.7, float("nan"))}, "must be above 0"),
    ({"min_samples": 0}, r"`min_samples` \(=0\) must be at least 1"),
    (
        {"min_samples": 41},
        r"`min_samples` \(=41\) must be at most the number of samples \(=40\)",
    ),
    (
        {"detector": IFND(num_samples=NUM_SAMPLES, num_clusters=(3,), space="features")},
        "must be 'projected'",
    ),
]


def test_what_is_wrong_is_named() -> None:
    for wrong, words in WRONG:
        with pytest.raises(ValueError, match=words):
            made(**wrong)


@pytest.mark.parametrize("criteria", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("hierarchy", ["online", "kmeans", "dbscan"])
def test_the_defaults_cluster_whatever_the_number_of_criteria(
    criteria: int, hierarchy: str
) -> None:
    framework = made(criteria=criteria, hierarchy=hierarchy, warmup_epochs=0)
    framework.refresh(everybody(), 0.0)
    assert framework.labels.shape == (criteria, NUM_SAMPLES)
    if hierarchy == "kmeans":
        assert [len(level.unique()) for level in framework.labels][1:] == {
            2: [8],
            3: [16, 8],
            4: [32, 16, 8],
        }.get(criteria, [32, 16, 8, 4, 2][: criteria - 1])


@pytest.mark.parametrize("kind", [NNCLR, RCL])
def test_detectors_that_collect_get_embeddings_not_predictions(kind: type[NNCLR | RCL]) -> None:
    detector = Hierarchy(num_samples=NUM_SAMPLES, radii=(0.4, 0.9))
    framework = made(kind, detector=detector)
    detector.refresh(everybody(), 0.0)
    seen = list[tuple[Tensor, Tensor]]()
    detector.collect = lambda ids, anchors, is_finite=None: seen.append((ids, anchors))  # type: ignore[method-assign]
    views, ids = batch(0)
    _, keys = step_of(framework, views)
    framework(views, ids)
    torch.testing.assert_close(seen, [(ids, torch.stack(keys))])
