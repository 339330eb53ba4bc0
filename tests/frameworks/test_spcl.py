"""SPCL equals the loops over its equations; prototypes, batches, heads that begin anew; state and
ranks; the traps of the public code."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kinfolk.detectors import IFND, Oracle
from kinfolk.errors import KinfolkWarning, UsageError
from kinfolk.frameworks.registry import Context, build, parse
from kinfolk.frameworks.spcl import SPCL
from kinfolk.objectives import NTXentLoss
from kinfolk.objectives.siamese import draw_partners
from tests.ranks import end_rank, spawn
from tests.reference import losses
from tests.reference import spcl as slow

N, T, SIZES = 40, 0.3, (3, 5)
LABELS = torch.arange(N) % 4


def made(num_clusters: int | tuple[int, ...] | None = (6, 3), seed: int = 0, **more: Any) -> SPCL:
    torch.manual_seed(seed)
    encoder, head = (
        nn.Sequential(nn.Flatten(), nn.Linear(12, 10), nn.LayerNorm(10), nn.ReLU()),
        nn.Linear(10, 5),
    )
    return SPCL(encoder, head, N, num_clusters, temperature=T, **more).double()


def features(seed: int = 0) -> Tensor:
    return torch.randn(N, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def batch(step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(2, size, 3, 2, 2, dtype=torch.float64, generator=g), torch.randperm(
        N, generator=g
    )[:size]


def terms(framework: SPCL, views: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three losses by loops; prototypes are looked up by sample number."""
    assert framework.assigned.clusters is not None
    assert framework.metric is not None
    assert framework.prototype is not None
    h1, h2 = (framework.encoder(view) for view in views)
    contrast = slow.contrast(framework.head(h1), framework.head(h2), T)
    h = torch.stack((h1, h2), 1).flatten(0, 1)
    own = framework.assigned.clusters.labels[:, ids]
    draw = torch.Generator().manual_seed(int(framework.seed) ^ int(framework.draws))
    drawn = draw_partners(own[0], 2, draw)
    rows = enumerate(
        zip(drawn.anchors_A.tolist(), drawn.same_A.tolist(), drawn.other_A.tolist(), strict=True)
    )
    pairs = [(number, same, other) for number, (used, same, other) in rows if used]
    metric = slow.metric(h, pairs, framework.metric.head)
    logits = framework.prototype.head(h).split([6, 3], 1)
    proto = (
        sum(
            (slow.cross_entropy(logits[k], own[k].repeat_interleave(2).tolist()) for k in (0, 1)),
            torch.zeros(()).double(),
        )
        / 2
    )
    return contrast, metric, proto


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.1, 2.0, 0.5), (0.0, 1.0, 1.0)])
def test_it_is_equation_5(weights: tuple[float, float, float]) -> None:
    framework = made(
        contrast_weight=weights[0], metric_weight=weights[1], prototype_weight=weights[2]
    )
    framework.refresh(features(), 0.0)
    views, ids = batch(0)
    expected = sum(
        (weight * term for weight, term in zip(weights, terms(framework, views, ids), strict=True)),
        torch.zeros(()).double(),
    )
    loss = framework(views, ids)
    torch.testing.assert_close(loss, expected)
    wanted = [p for p in framework.parameters() if p.requires_grad]
    torch.testing.assert_close(
        torch.autograd.grad(loss, wanted), torch.autograd.grad(expected, wanted)
    )
    assert framework.head.weight.requires_grad is bool(weights[0])


def test_equation_1_leaves_out_both_views() -> None:
    z = torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True)
    loss, expected = (
        NTXentLoss(temperature=T, decoupled=True)(z[0], z[1]),
        slow.contrast(z[0], z[1], T),
    )
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, z), torch.autograd.grad(expected, z))
    assert made().objective.decoupled is True  # type: ignore[comparison-overlap]


def test_without_prototypes_it_is_simclr() -> None:
    framework = made(metric_weight=0.0, prototype_weight=0.0, decoupled=False)
    views, ids = batch(0)
    z1, z2 = framework.head(framework.encoder(views.flatten(0, 1))).chunk(2)
    torch.testing.assert_close(framework(views, ids), losses.ntxent(z1, z2, T))
    assert not [
        name for name, _ in framework.named_parameters() if name.startswith(("metric", "prototype"))
    ]


def test_the_gradient_is_right() -> None:
    framework = made(detector=Oracle(LABELS), action="attract", reverse_weight=0.5).eval()
    framework.refresh(features(), 0.0)
    views, ids = batch(1, size=4)
    assert torch.autograd.gradcheck(lambda x: framework(x, ids), (views.requires_grad_(),))


def test_before_the_first_refresh_samples_are_alone() -> None:
    framework = made()
    views, ids = batch(0)
    loss = framework(views, ids)
    loss.backward()
    assert framework.batches(torch.Generator(), 8) is None
    assert framework.prototype is not None
    assert framework.prototype.head.weight.grad is not None
    assert framework.prototype.head.weight.grad.eq(0).all()


def test_prototypes_are_clusters_of_features_in_data_set_order() -> None:
    """The public code keeps them in the order in which the sampler came by."""
    framework = made(num_clusters=(4,))
    # of any norm
    planted = torch.eye(10, dtype=torch.float64)[LABELS] * (
        1 + torch.arange(N).double().unsqueeze(1)
    )
    framework.refresh(planted, 0.0)
    assert framework.assigned.clusters is not None
    found = framework.assigned.clusters.labels[0]
    assert all(len(set(found[k == LABELS].tolist())) == 1 for k in range(4))
    assert len(set(found.tolist())) == 4
    assert torch.equal(framework.assigned.first(torch.tensor([39, 2, 11])), found[[39, 2, 11]])
    ids = framework.batches(torch.Generator().manual_seed(0), 10)
    assert ids is not None
    assert all((LABELS[each].bincount() == 5).any() for each in ids.view(-1, 10)), (
        "half of each batch is one prototype"
    )


def test_labels_that_are_watched_change_nothing() -> None:
    """The public code draws its pairs by the true classes."""
    plain, watched = made(), made()
    watched.set_eval_labels(LABELS.flip(0))
    for framework in (plain, watched):
        framework.refresh(features(), 0.0)
    views, ids = batch(0)
    assert torch.equal(plain(views, ids), watched(views, ids))
    orders = [
        framework.batches(torch.Generator().manual_seed(3), 8) for framework in (plain, watched)
    ]
    assert orders[0] is not None
    assert orders[1] is not None
    assert torch.equal(orders[0], orders[1])


def test_the_classifier_is_as_wide_as_there_are_prototypes() -> None:
    """The public code's is as wide as there are classes."""
    context = Context(N, LABELS)
    for arguments, width in (({"num_clusters": (7, 5)}, 12), ({"prototypes": "labels"}, 4)):
        framework = build(
            parse("spcl"),
            nn.Sequential(nn.Flatten(), nn.Linear(12, 10)),
            nn.Linear(10, 5),
            context,
            arguments,
        )
        assert isinstance(framework, SPCL)
        assert framework.prototype is not None
        assert framework.prototype.head.out_features == width
    defaults = SPCL(nn.Linear(12, 10), nn.Linear(10, 5), 50_000)
    assert defaults.assigned.clusters is not None
    assert defaults.assigned.clusters.num_clusters == (510,)


def test_one_number_of_clusters_is_one_level() -> None:
    framework = made(5)
    assert framework.assigned.num_prototypes == (5,)
    framework.refresh(features(), 0.0)
    assert framework(*batch(0)).isfinite()


def test_after_the_last_epoch_a_detector_sees_embeddings_and_the_heads_stay() -> None:
    detector = IFND(num_samples=N, num_clusters=4)
    framework = made(detector=detector)
    framework.set_progress(2, 3)
    before = copy.deepcopy(framework.head.state_dict())
    framework.finish(features())
    want = IFND(num_samples=N, num_clusters=4)
    want.refresh(F.normalize(framework.head(features()), dim=1).detach(), 1.0)
    assert torch.equal(detector.labels, want.labels)
    assert all(
        torch.equal(value, before[name]) for name, value in framework.head.state_dict().items()
    )
    assert framework.assigned.clusters is not None
    assert not framework.assigned.clusters.refreshed


def test_prototypes_of_labels_are_trained_by_cross_entropy() -> None:
    labels = LABELS.where(torch.arange(N) > 5, -1)
    framework = made(prototypes="labels", labels=labels, metric_weight=0.0, contrast_weight=0.0)
    assert framework.due(0)
    assert framework.collects, "no pass over the data"
    framework.refresh(None, 0.0)
    views, ids = batch(0)
    ids[0] = 2
    assert framework.prototype is not None
    h = torch.stack([framework.encoder(view) for view in views], 1).flatten(0, 1)
    expected = slow.cross_entropy(
        framework.prototype.head(h), labels[ids].repeat_interleave(2).tolist()
    )
    torch.testing.assert_close(framework(views, ids), expected)
    order = framework.batches(torch.Generator().manual_seed(0), 20)
    assert order is not None
    assert len(set(order.tolist())) == 40
    assert "truth" not in framework.state_dict()
    unlabelled = Context(N)
    with pytest.raises((UsageError, ValueError), match="needs labels and the data has none"):
        build(
            parse("spcl"), nn.Linear(12, 10), nn.Linear(10, 5), unlabelled, {"prototypes": "labels"}
        )
    with pytest.raises(ValueError, match="needs labels and the data has none"):
        made(prototypes="labels", labels=torch.full((N,), -1))


@pytest.mark.parametrize("chosen", [("contrast", "metric", "prototype"), ("prototype",), ()])
def test_heads_begin_anew(chosen: tuple[Any, ...]) -> None:
    framework, again = made(reinitialise=chosen), made(seed=1, reinitialise=chosen)
    framework.set_progress(1, 4)
    before = copy.deepcopy(framework.state_dict())
    again.load_state_dict(before)
    again.set_progress(1, 4)
    framework.refresh(features(), 0.25)
    torch.manual_seed(77)
    again.refresh(features(), 0.25)
    after = copy.deepcopy(framework.state_dict())
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in after.items()), (
        "by its own seed alone"
    )
    heads = {
        "contrast": "head.weight",
        "metric": "metric.head.0.weight",
        "prototype": "prototype.head.weight",
    }
    for name, key in heads.items():
        assert torch.equal(before[key], after[key]) is (name not in chosen)
    assert torch.equal(before["encoder.1.weight"], after["encoder.1.weight"])
    renewed = {id(p) for p in framework.reinitialised}
    assert renewed == {
        id(p)
        for name, p in framework.named_parameters()
        if name.split(".")[0] in [{"contrast": "head"}.get(n, n) for n in chosen]
    }
    framework.set_progress(2, 4)
    framework.refresh(features(), 0.5)
    assert torch.equal(
        after["prototype.head.weight"], framework.state_dict()["prototype.head.weight"]
    ) is (not chosen), "others each time"


def test_a_warm_up_has_nt_xent_alone_on_random_batches() -> None:
    framework = made(warmup_epochs=2)
    views, ids = batch(0)
    z1, z2 = framework.head(framework.encoder(views.flatten(0, 1))).chunk(2)
    for epoch in range(2):
        framework.set_progress(epoch, 4)
        assert not framework.due(epoch)
        assert framework.batches(torch.Generator(), 8) is None
        loss = framework(views, ids)
        torch.testing.assert_close(loss, slow.contrast(z1, z2, T))
    loss.backward()
    assert all(p.grad is not None for p in framework.parameters()), "DDP waits for all"
    framework.set_progress(2, 4)
    assert framework.due(2)
    framework.refresh(features(), 0.5)
    assert framework.batches(torch.Generator(), 8) is not None
    expected = sum(terms(framework, views, ids), torch.zeros(()).double())
    torch.testing.assert_close(framework(views, ids), expected)
    labels = made(warmup_epochs=1, prototypes="labels", labels=LABELS)
    assert labels.batches(torch.Generator(), 8) is None, "true prototypes wait too"
    kept = made(warmup_epochs=1, prototypes="labels", labels=LABELS, reinitialise=())
    assert [kept.due(epoch) for epoch in range(3)] == [False, True, False]
    kept.set_progress(1, 4)
    kept.refresh(None, 0.25)
    assert kept.batches(torch.Generator(), 8) is not None
    with pytest.warns(
        KinfolkWarning, match=r"`warmup_epochs` \(=2\) is as long as the training \(=2 epochs\)"
    ):
        made(warmup_epochs=2).set_progress(0, 2)


def test_refreshes_are_due_every_few_epochs() -> None:
    framework = made(every=2)
    assert framework.reinitialised
    framework.set_progress(1, 4)
    assert not framework.reinitialised, (
        "a detector may be due; the optimiser then has nothing to forget"
    )
    assert [made(every=2).due(epoch) for epoch in range(4)] == [True, False, True, False]
    still = made(prototypes="labels", labels=LABELS, reinitialise=())
    assert not still.due(0)
    assert made(prototypes="labels", labels=LABELS).due(1)


@pytest.mark.parametrize("space", ["projected", "features"])
def test_a_detector_that_clusters_has_its_own_space(space: Any) -> None:
    framework = made(
        detector=IFND(num_samples=N, num_clusters=(3,), schedule="constant", space=space)
    ).double()
    detector = framework.detectors[0]
    assert isinstance(detector, IFND)
    head = copy.deepcopy(framework.head).eval()
    seen: list[Tensor | None] = []
    detector.refresh = lambda features, progress: seen.append(features)  # type: ignore[method-assign]
    framework.set_progress(1, 4)
    assert not framework.collects
    framework.refresh(features(), 0.5)
    expected = features() if space == "features" else F.normalize(head(features()), dim=1)
    torch.testing.assert_close(seen, [expected])
    assert framework.head.training


def test_evaluation_writes_nothing() -> None:
    framework = made(detector=Oracle(LABELS))
    framework.refresh(features(), 0.0)
    framework.eval()
    before = copy.deepcopy(framework.state_dict())
    views, ids = batch(0)
    first = framework(views, ids)
    assert torch.equal(framework(views, ids), first)
    framework.batches(torch.Generator(), 8)
    assert all(torch.equal(value, before[name]) for name, value in framework.state_dict().items())
    framework.train()
    assert len({framework(views, ids).item() for _ in range(4)}) > 1, (
        "in training, other pairs at every step"
    )


def train(framework: SPCL, steps: range) -> list[float]:
    optimizer, found = (
        torch.optim.SGD([p for p in framework.parameters() if p.requires_grad], lr=0.1),
        [],
    )
    for step in steps:
        framework.set_progress(step // 2, 4)
        if step % 2 == 0 and framework.due(step // 2):
            framework.refresh(features(step), step / 8)
        order = framework.batches(torch.Generator().manual_seed(step // 2), 8)
        assert order is not None
        optimizer.zero_grad()
        loss = framework(batch(step)[0], order[step % 2 * 8 :][:8])
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_save_load_continue_equals_uninterrupted() -> None:
    whole, first, second = (made(seed=seed) for seed in (0, 0, 1))
    expected = train(whole, range(8))
    train(first, range(5))
    second.load_state_dict(first.state_dict())
    assert train(second, range(5, 8)) == expected[5:]
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole.state_dict().values(), second.state_dict().values(), strict=True)
    )


def test_degenerate_clusters_stay_finite() -> None:
    """Fewer distinct samples than prototypes: some hold equal samples, some are empty; half
    precision, a low temperature."""
    for dtype in (torch.float64, torch.bfloat16):
        framework = made()
        framework.refresh(features()[torch.arange(N) % 2], 0.5)
        framework.objective.temperature = 0.01
        views, ids = batch(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = framework(views, ids)
        loss.backward()
        assert loss.isfinite()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in framework.parameters())
        order = framework.batches(torch.Generator(), 8)
        assert order is not None
        assert len(set(order.tolist())) == N


def test_wrong_arguments_are_refused_with_name_value_and_rule() -> None:
    wrong: dict[str, Any] = {
        "every": 0,
        "metric_weight": -1.0,
        "prototypes": "none",
        "reinitialise": ("encoder",),
        "reverse_weight": -1.0,
    }
    wrong |= {"warmup_epochs": -1}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"`{name}`"):
            made(**{name: value})
    with pytest.raises(ValueError, match="must be above 0"):
        made(contrast_weight=0.0, metric_weight=0.0, prototype_weight=0.0)
    with pytest.raises(
        ValueError, match=r"`warmup_epochs` \(=1\) must be 0 if `contrast_weight` is 0"
    ):
        made(contrast_weight=0.0, warmup_epochs=1)


ARGUMENTS: dict[str, dict[str, Any]] = {
    "all": {"detector": Oracle(LABELS), "reverse_weight": 0.2},
    "no contrast": {"contrast_weight": 0.0},
    "labels": {"prototypes": "labels", "labels": LABELS, "metric_weight": 0.5},
}


def some_steps(
    module: nn.Module, framework: SPCL, parts: list[tuple[Tensor, Tensor]]
) -> dict[str, Any]:
    out: dict[str, Any] = {"loss": [], "gradient": []}
    trained = [p for p in framework.parameters() if p.requires_grad]
    for step, (views, ids) in enumerate(parts):
        framework.set_progress(step, len(parts))
        framework.refresh(features(step), 0.5)
        framework.zero_grad()
        loss = module(views, ids)
        loss.backward()
        out["loss"].append(loss.item())
        out["gradient"].append([p.grad.clone() for p in trained if p.grad is not None])
    order = framework.batches(torch.Generator().manual_seed(0), 8)
    return {
        **out,
        "order": order,
        "state": {name: value.clone() for name, value in framework.state_dict().items()},
    }


def on_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(SIZES)
    )
    results = {}
    for name, arguments in ARGUMENTS.items():
        framework = made(**arguments)
        buffers = [buffer for buffer, _ in framework.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(framework, buffers)  # type: ignore[no-untyped-call]
        joined = [batch(step, sum(SIZES)) for step in range(3)]
        parts = [
            (torch.split(views, list(SIZES), 1)[rank], torch.split(ids, list(SIZES))[rank])
            for views, ids in joined
        ]
        results[name] = some_steps(DistributedDataParallel(framework), framework, parts)
    torch.save(results, f"{folder}/{rank}.pt")
    end_rank()


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    spawn(on_rank, (str(tmp_path),), nprocs=len(SIZES))
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(len(SIZES))]
    for name, arguments in ARGUMENTS.items():
        framework = made(**arguments)
        expected = some_steps(framework, framework, [batch(step, sum(SIZES)) for step in range(3)])
        for rank in found:
            for what in ("loss", "gradient", "order", "state"):
                torch.testing.assert_close(rank[name][what], expected[what])
