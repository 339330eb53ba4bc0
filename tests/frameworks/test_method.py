from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kinfolk.actions import ACTIONS
from kinfolk.detectors import DETECTORS, StartAt
from kinfolk.errors import UsageError
from kinfolk.frameworks import FRAMEWORKS
from kinfolk.frameworks.method import Context, Method, build, detector_arguments, framework_arguments, parse

NUM_SAMPLES = 24
REQUIRED: dict[str, dict[str, Any]] = {
    "glofnd": {"alpha": 0.1},
    "fnc": {"top_k": 2},
    "cave": {"num_clusters": 3},
    "known": {"pairs": torch.tensor([[0, 2], [4, 8]])},
}
SMALL: dict[str, dict[str, Any]] = {
    "moco": {"queue_size": 10},
    "ir": {"num_negatives": 20, "bank_momentum": 0.0},
    "pcl": {"queue_size": 10},
    "nnclr": {"queue_size": 10, "predictor_size": 16},
    "rcl": {"queue_size": 10, "predictor_size": 16},
}
"""What a framework needs for a data set of 24 samples; a queue that the batch does not divide."""
METHODS = [*FRAMEWORKS, *(f"{f}+{d}:{a}" for f in FRAMEWORKS for d in DETECTORS for a in ACTIONS)]


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("simclr", Method("simclr")),
        ("sogclr+glofnd", Method("sogclr", "glofnd", "eliminate")),
        (" SimCLR+Oracle:attract ", Method("simclr", "oracle", "attract")),
    ],
)
def test_parse(name: str, method: Method) -> None:
    assert parse(name) == method
    assert parse(str(method)) == method


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("simclrr", "unknown framework 'simclrr'.*did you mean simclr"),
        ("simclr+glofmd", "unknown detector 'glofmd'.*did you mean glofnd"),
        ("simclr+oracle:atract", "unknown action 'atract'.*did you mean attract"),
        ("", "unknown framework ''.*there are: simclr"),
        ("simclr+", "unknown detector ''"),
        ("simclr+oracle:", "unknown action ''"),
    ],
)
def test_an_unknown_part_is_refused_with_the_nearest(name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse(name)


def test_arguments_are_read_off_the_signatures() -> None:
    method = parse("sogclr+glofnd")
    assert {"temperature", "gamma"} <= framework_arguments(method).keys()
    assert {"alpha", "start_epoch"} <= detector_arguments(method).keys()
    assert not {"encoder", "head", "num_samples", "detector", "action"} & framework_arguments(method).keys()
    assert detector_arguments(method)["alpha"].default == 0.01  # the class requires it; a training has a usual value
    assert detector_arguments(parse("simclr")) == {}
    fnc = parse("simclr+fnc")
    assert detector_arguments(fnc)["fraction"].default == 0.01
    assert detector_arguments(fnc, {"top_k": 3})["fraction"].default is None, "one of the three is enough"


@pytest.mark.parametrize("name", METHODS)
def test_every_composition_trains(name: str) -> None:
    """Ten steps lower the loss of a fixed batch, and all parameters receive a finite gradient."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU())
    method = parse(name)
    text = (nn.EmbeddingBag(30, 16), nn.Linear(16, 8))
    context = Context(NUM_SAMPLES, torch.arange(NUM_SAMPLES) % 3, text)
    arguments = {"temperature": 0.5, **SMALL.get(method.framework, {})}
    framework = build(method, encoder, nn.Linear(16, 8), context, arguments, REQUIRED.get(method.detector or "", {}))
    trained = [p for p in framework.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    views, ids = torch.randn(framework.num_views, 12, 3, 2, 2), torch.arange(12) * 2
    texts = {"tokens": torch.randint(30, (12, 5)), "groups": torch.arange(12) // 2} if "text" in framework.modalities else {}
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = framework(views, ids, **texts)
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in trained)
        optimizer.step()
        framework.after_step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert framework.embed(views[0]).norm(dim=1).allclose(torch.ones(12))
    assert framework.features(views[0]).shape == (12, 16)


def test_a_start_epoch_delays_the_detector() -> None:
    torch.manual_seed(0)
    context = Context(NUM_SAMPLES, torch.arange(NUM_SAMPLES) % 3)
    views, ids = torch.randn(2, 12, 3, 2, 2), torch.arange(12)
    encoder, head = nn.Flatten(), nn.Linear(12, 8)
    plain = build(parse("simclr"), encoder, head, context)
    late = build(parse("simclr+oracle"), encoder, head, context, {}, {"start_epoch": 2})
    assert isinstance(late.objective.detector, StartAt)
    for epoch, same in ((1, True), (2, False)):
        late.set_progress(epoch, 4)
        assert torch.equal(plain(views, ids), late(views, ids)) is same


def test_what_is_missing_is_named() -> None:
    encoder, head = nn.Flatten(), nn.Linear(12, 8)
    with pytest.raises(UsageError, match="needs labels"):
        build(parse("simclr+oracle"), encoder, head, Context(NUM_SAMPLES))
    with pytest.raises(UsageError, match=r"needs `detector\.start_epoch`"):
        build(parse("simclr+fnc"), encoder, head, Context(NUM_SAMPLES), {}, {"top_k": 1, "update_from": 2})
