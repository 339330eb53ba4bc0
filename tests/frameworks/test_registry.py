from __future__ import annotations

import pytest
import torch
from torch import nn

from kinfolk.detectors import StartAt
from kinfolk.errors import UsageError
from kinfolk.frameworks.registry import Context, Method, build, detector_arguments, framework_arguments, parse

NUM_SAMPLES = 24


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
