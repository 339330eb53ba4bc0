from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import kinfolk as kf
from kinfolk.detectors import StartAt
from kinfolk.errors import UsageError
from kinfolk.frameworks import FRAMEWORKS
from kinfolk.frameworks.registry import (
    Context,
    Method,
    build,
    detector_arguments,
    framework_arguments,
    parse,
)
from kinfolk.training.settings import check_arguments

NUM_SAMPLES = 24
ESTIMATE = {"prior": 0.1, "hardness": 0.5, "decoupled": True}


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("simclr", Method("simclr")),
        ("sogclr+glofnd", Method("sogclr", "glofnd", "eliminate")),
        (" SimCLR+Oracle:attract ", Method("simclr", "oracle", "attract")),
    ],
)
def test_a_name_parses_to_its_parts_and_back(name: str, method: Method) -> None:
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
    assert (
        not {"encoder", "head", "num_samples", "detector", "action"}
        & framework_arguments(method).keys()
    )
    # the class requires it; a training has a usual value
    assert detector_arguments(method)["alpha"].default == 0.01
    assert detector_arguments(parse("simclr")) == {}
    fnc = parse("simclr+fnc")
    assert detector_arguments(fnc)["alpha"].default == 0.01
    assert detector_arguments(fnc, {"top_k": 3})["alpha"].default is None, (
        "one of the three is enough"
    )


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
        build(
            parse("simclr+fnc"),
            encoder,
            head,
            Context(NUM_SAMPLES),
            {},
            {"top_k": 1, "update_from": 2},
        )


REASONS = {
    "sogclr": {
        "prior": "not linear",
        "hardness": "ratio of two means",
        "decoupled": "not in the mean over negatives anyway",
    },
    "la": dict.fromkeys(ESTIMATE, "in numerator and denominator"),
    "nnclr": dict.fromkeys(ESTIMATE, "entries of the queue too"),
    "siglip": dict.fromkeys(ESTIMATE, "classified by itself"),
}
REASONS |= {
    "sogclr-clip": REASONS["sogclr"],
    "fastclip": REASONS["sogclr"],
    "rcl": REASONS["nnclr"],
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_prior_is_taken_or_refused_with_a_reason(name: str) -> None:
    settable = framework_arguments(parse(name))
    for key, value in ESTIMATE.items():
        if key in settable:
            assert name not in REASONS
            assert (
                check_arguments(FRAMEWORKS[name], settable, {key: value}, "framework", name)[key]
                == value
            )
            continue
        with pytest.raises(
            UsageError,
            match=(
                rf"^`framework.{key}` \(={value}\) must be left out with {name}:"
                rf" .*{REASONS[name][key]}"
            ),
        ):
            check_arguments(FRAMEWORKS[name], settable, {key: value}, "framework", name)


@pytest.mark.parametrize("loss", [kf.SogCLRLoss, kf.FastCLIPLoss, kf.BimodalSogCLRLoss])
def test_losses_refuse_a_prior_themselves(loss: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"`prior` \(=0.1\) must be left out with \w+: its maximum .* is not linear",
    ):
        loss(num_samples=12, temperature=0.3, prior=0.1)


@pytest.mark.parametrize("name", ["ir", "cmc", "spcl"])
def test_a_prior_reaches_every_contrast(name: str) -> None:
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(12, 6))
    framework = build(
        parse(name),
        encoder,
        nn.Linear(6, 4),
        Context(12),
        {"prior": 0.2, "hardness": 0.5, "decoupled": True},
    )
    for objective in framework.objectives:
        assert isinstance(objective, kf.NTXentLoss)
        assert (objective.prior, objective.hardness, objective.decoupled) == (0.2, 0.5, True)


@pytest.mark.parametrize(("name", "decoupled"), [("spcl", True), ("simclr", False)])
def test_spcl_is_decoupled_by_default(name: str, decoupled: bool) -> None:
    assert framework_arguments(parse(name))["decoupled"].default is decoupled
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(12, 6))
    for given, expected in (({}, decoupled), ({"decoupled": not decoupled}, not decoupled)):
        objective = build(parse(name), encoder, nn.Linear(6, 4), Context(12), given).objective
        assert isinstance(objective, kf.NTXentLoss)
        assert objective.decoupled is expected


@pytest.mark.parametrize("name", ["ir", "cmc"])
def test_pooled_kin_take_no_prior(name: str) -> None:
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(12, 6))
    off = {"prior": None, "hardness": None, "decoupled": False, "pool_kin": True}
    assert build(parse(name), encoder, nn.Linear(6, 4), Context(12), off)
    with pytest.raises(
        ValueError,
        match=r"`hardness` \(=0.5\) must be left out with LocalAggregationLoss: close neighbours",
    ):
        build(parse(name), encoder, nn.Linear(6, 4), Context(12), {**off, "hardness": 0.5})
