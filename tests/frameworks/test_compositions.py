"""Every framework with every detector through its whole life: warm-up, start, refreshes and the
epochs after them.

Each pair of a framework and a detector is trained once. Actions, kinds of the detector and mixed
precision take turns, so that any two of them meet. The loop calls the hooks of a training in the
order in which `kinfolk.training` calls them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from kinfolk.detectors import DETECTORS
from kinfolk.detectors.base import Answer, Detector
from kinfolk.errors import UsageError
from kinfolk.frameworks import FRAMEWORKS, Framework
from kinfolk.frameworks.registry import Context, build, parse
from kinfolk.pairs import ACTIONS, Block
from kinfolk.seeding import generator

NUM_SAMPLES, NUM_CLASSES, BATCH, EPOCHS, WARMUP = 36, 3, 18, 5, 1
DETECTOR_ARGS: dict[str, dict[str, Any]] = {
    "oracle": {"start_epoch": WARMUP},
    "fnc": {"top_k": 2, "start_epoch": WARMUP},
    "glofnd": {"alpha": 0.2, "init": "quantile", "start_epoch": WARMUP, "update_from": 0},
    "ifnd": {"num_clusters": (3, 6)},  # its linear schedule is its warm-up
    "neighbours": {
        "num_clusters": 3,
        "num_clusterings": 2,
        "num_background": 8,
        "start_epoch": WARMUP,
    },
    "ring": {"lower": 0.5, "upper": 0.8, "anneal": "linear", "start_epoch": WARMUP},
    "cave": {"num_clusters": 3, "start_epoch": WARMUP},
    "hierarchy": {"levels": 3, "radii": (0.3, 0.8), "min_samples": 2, "warmup_epochs": WARMUP},
    "known": {
        "pairs": torch.stack(
            (torch.arange(NUM_SAMPLES), (torch.arange(NUM_SAMPLES) + 3) % NUM_SAMPLES), 1
        ),
        "start_epoch": WARMUP,
    },
}
DETECTOR_ARGS["guide"] = {
    "features": torch.eye(NUM_CLASSES)[torch.arange(NUM_SAMPLES) % NUM_CLASSES],
    "alpha": 0.2,
    "start_epoch": WARMUP,
}
DETECTOR_ARGS["components"] = {"start_epoch": WARMUP}
DETECTOR_ARGS["positive_margin"] = {"margin": 0.3, "start_epoch": WARMUP}
DETECTOR_ARGS["teacher"] = {"start_epoch": WARMUP}
FRAMEWORK_ARGS: dict[str, dict[str, Any]] = {
    "moco": {"queue_size": 20},
    "ir": {"num_negatives": 20, "bank_momentum": 0.0},
    "cmc": {"num_negatives": 20},
    "la": {"num_background": 8, "num_clusters": 3, "num_clusterings": 2, "warmup_epochs": WARMUP},
    "pcl": {"queue_size": 20, "num_clusters": (3, 6), "warmup_epochs": WARMUP},
    "mocov3": {"predictor_size": 8},
    "nnclr": {"queue_size": 20, "predictor_size": 8},
    "rcl": {
        "queue_size": 20,
        "predictor_size": 8,
        "radii": (0.3, 0.8),
        "min_samples": 2,
        "warmup_epochs": WARMUP,
    },
    "spcl": {"num_clusters": (3,), "warmup_epochs": WARMUP},
    "siglip": {"bias": -2.0, "temperature": 1.0},
}
"""What each needs for 36 samples; a queue that the batch does not divide."""
NORMALISED = ("mocov3", "nnclr", "rcl")
"""Frameworks whose predictor begins with a linear layer and a BatchNorm. Here only linear layers
without bias are between the encoder's bias and that norm, which subtracts the mean over the batch,
so the gradient of this bias is 0 except for rounding."""
KINDS: dict[str, tuple[dict[str, Any], ...]] = {
    "ifnd": ({}, {"source": "bank"}, {"space": "features"}),
    "neighbours": ({}, {"space": "features"}),
    "glofnd": ({}, {"shared": True, "rule": "adam", "lr": 0.5}),
    "ring": ({}, {"num_clusters": 3}, {"anneal": "knn"}),
    "guide": ({}, {"alpha": None, "temperature": 0.2}),
    "hierarchy": ({}, {"warmup_epochs": 0, "start_epoch": WARMUP}),
}
"""Kinds of a detector, by arguments; None removes one of `DETECTOR_ARGS`."""
SAME_FEATURES = ("pcl", "rcl")
"""Frameworks that use one embedding pass for their own clusters and the detector, and it has
projected embeddings."""


class Case(NamedTuple):
    """A composition, the arguments of its detector, and whether it trains in bfloat16."""

    name: str
    detector_args: dict[str, Any]
    mixed: bool

    def __str__(self) -> str:
        kind = "".join(f", {key}={value}" for key, value in self.detector_args.items())
        return self.name + kind + (", mixed" if self.mixed else "")


def cases() -> Iterator[Case]:
    """One case for each framework, and one for each framework and detector that work together.

    The action of the i-th framework turns with i mod 3 and the kind of the detector with i div 3,
    so each kind meets each action."""
    for i, (framework, kind) in enumerate(FRAMEWORKS.items()):
        yield Case(framework, {}, i % 2 == 0)
        for j, detector in enumerate(DETECTORS):
            if detector == "teacher" and "teacher" not in kind.guides:
                continue
            kinds = KINDS.get(detector, ({},))
            given = kinds[i // 3 % len(kinds)]
            if framework in SAME_FEATURES and "space" in given:
                given = {}
            soft = detector == "teacher" or "temperature" in given
            actions = ("attract", "reweight") if soft else ACTIONS
            yield Case(
                f"{framework}+{detector}:{actions[(i + j) % len(actions)]}", given, (i + j) % 2 == 0
            )


@dataclass
class Epoch:
    """What happened in one epoch."""

    refreshed: bool
    losses: list[float]
    flagged: int
    dropped: bool


def made(
    name: str,
    framework_args: dict[str, Any] | None = None,
    detector_args: dict[str, Any] | None = None,
) -> Framework:
    torch.manual_seed(0)
    method = parse(name)
    encoder, head = nn.Sequential(nn.Flatten(), nn.Linear(12, 16)), nn.Linear(16, 8, bias=False)
    context = Context(
        NUM_SAMPLES,
        torch.arange(NUM_SAMPLES) % NUM_CLASSES,
        (nn.EmbeddingBag(12, 16), nn.Linear(16, 8)),
    )
    own = {"temperature": 0.5, **FRAMEWORK_ARGS.get(method.framework, {}), **(framework_args or {})}
    detector = (
        {}
        if method.detector is None
        else {**DETECTOR_ARGS[method.detector], **(detector_args or {})}
    )
    detector = {key: value for key, value in detector.items() if value is not None}
    return build(method, encoder, head, context, own, detector)


def life(framework: Framework, epochs: int = EPOCHS, mixed: bool = False) -> Iterator[Epoch]:
    """Trains on three separate classes; yields after each epoch. `mixed`: in bfloat16 where torch's
    autocast has it."""
    draw = torch.Generator().manual_seed(1)
    images = (
        3
        * torch.randn(NUM_CLASSES, 3, 2, 2, generator=draw)[torch.arange(NUM_SAMPLES) % NUM_CLASSES]
    )
    images += 0.5 * torch.randn(images.shape, generator=draw)
    optimizer = torch.optim.SGD(
        [p for p in framework.parameters() if p.requires_grad], lr=0.05, momentum=0.9
    )
    framework.set_eval_labels(torch.arange(NUM_SAMPLES) % NUM_CLASSES)
    framework.train()
    dropped = spied(framework)
    for epoch in range(epochs):
        framework.set_progress(epoch, epochs)
        due = framework.due(epoch)
        if due:
            framework.refresh(features(framework, images), epoch / epochs)
            for parameter in framework.reinitialised:
                optimizer.state.pop(parameter, None)
        order = framework.batches(generator(0, "order", epoch), BATCH)
        order = torch.randperm(NUM_SAMPLES, generator=draw) if order is None else order
        lived = Epoch(due, [], 0, False)
        dropped.clear()
        steps = torch.split(order, BATCH)
        for step, ids in enumerate(steps):
            framework.set_progress(epoch + step / len(steps), epochs)
            views = images[ids] + 0.2 * torch.randn(
                framework.num_views, len(ids), 3, 2, 2, generator=draw
            )
            texts = {}
            if "text" in framework.modalities:
                texts = {
                    "tokens": torch.randint(4, (len(ids), 5), generator=draw)
                    + 4 * (ids % 3).unsqueeze(1),
                    "groups": ids // 2,
                }
            if "image" not in framework.modalities:  # one encoder for both sides
                noise = torch.randn(len(ids), 1, 3, 2, 2, generator=draw)
                texts["tokens"] = images[ids].unsqueeze(1) + 0.2 * noise
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                loss = framework(views, ids, **texts)
            loss.backward()
            optimizer.step()
            framework.after_step()
            lived.losses.append(loss.item())
            lived.flagged += int(framework.stats.flagged)
        framework.on_metric("knn", 0.5)
        lived.dropped = bool(dropped)
        yield lived


@torch.no_grad()
def features(framework: Framework, images: Tensor) -> Tensor | None:
    """What `kinfolk.training.refresh` hands over."""
    if framework.collects:
        return None
    if framework.space == "features":
        return framework.features(images)
    return framework.embed(images) if framework.known_features is None else framework.known_features


def spied(framework: Framework) -> list[Detector]:
    """A list to which a detector is added each time it drops candidates that are not kin."""
    dropped: list[Detector] = []

    def find(detector: Detector, original: Any, block: Block) -> Answer:
        found: Answer = original(block)
        if any(kin.ignore is not None for kin in (found if isinstance(found, tuple) else (found,))):
            dropped.append(detector)
        return found

    for detector in framework.detectors:
        detector.find = functools.partial(find, detector, detector.find)  # type: ignore[method-assign]
    return dropped


def test_a_teacher_is_refused_where_there_is_none() -> None:
    for framework in (name for name, kind in FRAMEWORKS.items() if "teacher" not in kind.guides):
        for action in ACTIONS:
            with pytest.raises((ValueError, UsageError), match="has no teacher: use"):
                made(f"{framework}+teacher:{action}")


def test_soft_degrees_are_not_eliminated() -> None:
    for name, given in (
        ("simclr+teacher", {}),
        ("moco+teacher", {}),
        ("clip+guide", KINDS["guide"][1]),
    ):
        with pytest.raises(ValueError, match="must be 'attract' or 'reweight'"):
            made(f"{name}:eliminate", detector_args=given)


@pytest.mark.parametrize("framework", SAME_FEATURES)
def test_features_are_refused_where_embeddings_are_clustered(framework: str) -> None:
    for detector in ("ifnd", "neighbours"):
        with pytest.raises(ValueError, match="must be 'projected'"):
            made(f"{framework}+{detector}", detector_args={"space": "features"})


def test_the_cases_have_every_pair() -> None:
    found: dict[str, set[Any]] = {"actions": set(), "kinds": set(), "precisions": set()}
    for case in cases():
        method = parse(case.name)
        if method.detector is not None:
            kind = f"{method.detector}{case.detector_args}"
            found["actions"] |= {(method.framework, method.action), (kind, method.action)}
            found["kinds"] |= {(method.framework, method.detector)}
            found["precisions"] |= {
                (method.framework, case.mixed),
                (kind, case.mixed),
                (method.action, case.mixed),
            }
    kinds = {
        f"{name}{given}": "temperature" in given or name == "teacher"
        for name in DETECTORS
        for given in KINDS.get(name, ({},))
    }
    sides = (*FRAMEWORKS, *kinds)
    assert found["actions"] == {
        (side, action)
        for side in sides
        for action in ACTIONS
        if action != "eliminate" or not kinds.get(side)
    }
    assert len(found["kinds"]) == len(FRAMEWORKS) * len(DETECTORS) - sum(
        "teacher" not in kind.guides for kind in FRAMEWORKS.values()
    )
    assert found["precisions"] == {
        (side, mixed) for side in (*sides, *ACTIONS) for mixed in (False, True)
    }


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_every_composition_trains_through_its_whole_life(case: Case) -> None:
    method, framework = parse(case.name), made(case.name, detector_args=case.detector_args)
    before = {
        key: value.clone() for key, value in framework.named_parameters() if value.requires_grad
    }
    epochs = list(life(framework, mixed=case.mixed))
    losses = torch.tensor([epoch.losses for epoch in epochs])
    assert losses.isfinite().all()
    assert losses[-1].mean() != losses[0].mean()
    still = [
        key
        for key, value in framework.named_parameters()
        if key in before and torch.equal(value, before[key])
    ]
    assert set(still) <= ({"encoder.1.bias"} if method.framework in NORMALISED else set())
    assert all(value.isfinite().all() for value in framework.parameters())
    images = torch.randn(5, 3, 2, 2)
    assert framework.features(images).shape == (5, 16)
    torch.testing.assert_close(framework.embed(images).norm(dim=1), torch.ones(5))
    detector = "neighbours" if case.name == "la" else method.detector
    for epoch in epochs[:WARMUP]:
        assert not epoch.flagged
        assert not epoch.dropped
    for number, epoch in enumerate(epochs[WARMUP:], WARMUP):
        assert (epoch.dropped if detector == "cave" else epoch.flagged > 0) is (
            detector is not None
        ), f"epoch {number}"
    clustered = detector in ("cave", "ifnd", "neighbours") or method.framework in ("pcl", "spcl")
    assert sum(epoch.refreshed for epoch in epochs[WARMUP:]) >= (
        2 if clustered else detector == "hierarchy"
    )


@pytest.mark.parametrize("name", ["simclr", *NORMALISED])
def test_a_bias_before_a_norm_has_no_gradient(name: str) -> None:
    framework, draw = made(name).double(), torch.Generator().manual_seed(0)
    framework(
        torch.randn(framework.num_views, BATCH, 3, 2, 2, dtype=torch.float64, generator=draw),
        torch.arange(BATCH),
    ).backward()
    gradient = framework.get_parameter("encoder.1.bias").grad
    assert gradient is not None
    assert (gradient.abs().max() < 1e-12).item() is (name in NORMALISED)
    assert framework.get_parameter("encoder.1.weight").grad.abs().max() > 1e-4  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("moco+ifnd", {"symmetric": True}),
        ("pcl+hierarchy", {"queue_size": 0}),
        ("pcl+cave", {"every": 2, "num_prototypes": 2}),
        ("rcl+ifnd", {"hierarchy": "kmeans", "radii": None, "min_samples": 4}),
        ("rcl+hierarchy", {"hierarchy": "dbscan"}),
        ("rcl+cave", {"criteria": 1, "radii": None, "min_samples": 4}),
        ("spcl+ifnd", {"prototypes": "labels", "num_clusters": None}),
        ("spcl+hierarchy", {"metric_weight": 0, "prototype_weight": 0, "reinitialise": ()}),
    ],
)
def test_every_option_of_a_framework_trains_with_a_detector(
    name: str, arguments: dict[str, Any]
) -> None:
    epochs = list(life(made(name, arguments)))
    assert torch.tensor([epoch.losses for epoch in epochs]).isfinite().all()
    assert all(
        epoch.dropped if name.endswith("cave") else epoch.flagged for epoch in epochs[WARMUP:]
    )


@pytest.mark.parametrize(
    ("warmup", "start", "update_from"), [(1, 3, None), (3, 1, None), (1, 3, 2)]
)
def test_a_hierarchy_with_a_late_start_flags_from_the_later_of_both(
    warmup: int, start: int, update_from: int | None
) -> None:
    arguments = {"warmup_epochs": warmup, "start_epoch": start, "update_from": update_from}
    epochs = list(life(made("simclr+hierarchy", detector_args=arguments)))
    assert [epoch.flagged > 0 for epoch in epochs] == [False, False, False, True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool])
def test_every_framework_refuses_ids_that_are_not_integers(dtype: torch.dtype) -> None:
    for framework in FRAMEWORKS:
        trained = made(framework)
        texts = {"tokens": torch.randint(4, (4, 5))} if "text" in trained.modalities else {}
        if "image" not in trained.modalities:
            texts = {"tokens": torch.randn(4, 1, 3, 2, 2)}
        with pytest.raises(ValueError, match=r"`ids` \(=torch\.\w+\) must be an integer tensor"):
            trained(torch.randn(trained.num_views, 4, 3, 2, 2), torch.arange(4).to(dtype), **texts)
