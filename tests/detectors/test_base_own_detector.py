"""A detector that a user writes: short, with state, on every loss; wrong answers get one
sentence."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import kinfolk as kf
from kinfolk.objectives import Objective
from kinfolk.objectives.fastclip import RobustContrastLoss
from kinfolk.pairs import ACTIONS, Action

N, B = 10, 6


def test_what_a_detector_is_made_of_is_public() -> None:
    from kinfolk import detectors, pairs

    assert kf.Detector is detectors.Detector
    assert (kf.Kin, kf.Block) == (pairs.Kin, pairs.Block)
    assert {"Detector", "Kin", "Block", "register_detector"} <= set(kf.__all__) & set(dir(kf))


class AboveMean(kf.Detector):
    """Kin are more similar than the sample's moving mean by a margin."""

    mean: Tensor

    def __init__(self, *, num_samples: int, margin: float = 0.3) -> None:
        super().__init__()
        self.num_samples, self.margin = num_samples, margin
        self.register_buffer("mean", torch.zeros(num_samples))

    def find(self, block: kf.Block) -> kf.Kin:
        other = block.sim_RC > -2
        now = (block.sim_RC * other).view(len(block.ids), -1).sum(1) / block.num_per_sample
        mean = 0.5 * self.mean[block.ids] + 0.5 * now
        kin = block.sim_RC > block.per_row(mean + self.margin).unsqueeze(1)
        return kf.Kin(kin, update={"mean": mean})

    def observe(self, ids: Tensor, update: Mapping[str, Tensor], is_finite: Any = None) -> None:
        self.mean[ids] = update["mean"].float()


def test_a_detector_with_state_is_twenty_lines() -> None:
    assert len(inspect.getsource(AboveMean).splitlines()) <= 20


def views(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    z1, z2 = torch.randn(2, B, 4, generator=g, dtype=torch.float64)
    return z1.requires_grad_(), z2.requires_grad_(), torch.randperm(N, generator=g)[:B]


LOSSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "ntxent": (kf.NTXentLoss, {}),
    "sogclr": (kf.SogCLRLoss, {"num_samples": N}),
    "robust": (RobustContrastLoss, {"num_samples": N}),
    "local aggregation": (kf.LocalAggregationLoss, {}),
    "relative": (kf.RelativeContrastLoss, {}),
    "clip": (kf.CLIPLoss, {}),
    "siglip": (kf.SigLIPLoss, {}),
    "bimodal sogclr": (kf.BimodalSogCLRLoss, {"num_samples": N}),
    "fastclip": (kf.FastCLIPLoss, {"num_samples": N}),
}


def detectors_of(loss_fn: torch.nn.Module) -> list[AboveMean]:
    return [part for part in loss_fn.modules() if isinstance(part, AboveMean)]


@pytest.mark.parametrize("name", LOSSES)
def test_it_works_with_every_loss_and_action(name: str) -> None:
    for action in ACTIONS:
        kind, arguments = LOSSES[name]
        loss_fn = kind(detector=AboveMean(num_samples=N), action=action, block_rows=4, **arguments)
        z1, z2, ids = views()
        loss = loss_fn(z1, z2, ids)
        loss.backward()
        assert loss.isfinite()
        assert z1.grad is not None
        assert z1.grad.isfinite().all()
        assert int(loss_fn.stats.flagged) > 0
        for detector in detectors_of(loss_fn):
            assert set(detector.mean.nonzero().flatten().tolist()) == set(ids.tolist())
        before = [detector.mean.clone() for detector in detectors_of(loss_fn)]
        loss_fn.eval()(z1, z2, ids)
        assert all(map(torch.equal, before, (detector.mean for detector in detectors_of(loss_fn))))


@pytest.mark.parametrize("name", ["ntxent", "sogclr", "clip", "fastclip"])
def test_its_state_is_saved_and_goes_on(name: str) -> None:
    kind, arguments = LOSSES[name]
    whole = kind(detector=AboveMean(num_samples=N), **arguments)
    assert any(key.endswith("detector.mean") for key in whole.state_dict())
    for seed in range(2):
        whole(*views(seed))
    resumed = kind(detector=AboveMean(num_samples=N), **arguments)
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    for seed in range(2, 4):
        assert torch.equal(whole(*views(seed)), resumed(*views(seed)))
    saved = resumed.state_dict()
    assert all(torch.equal(value, saved[key]) for key, value in whole.state_dict().items())


def test_blocks_of_any_size_find_the_same_kin_and_state() -> None:
    found = []
    for block_rows in (None, 1, 4):
        detector = AboveMean(num_samples=N)
        loss_fn = kf.NTXentLoss(detector=detector, block_rows=block_rows)
        found.append((loss_fn(*views()), loss_fn.stats.flagged, detector.mean))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_a_users_detector_is_wrapped() -> None:
    detector = AboveMean(num_samples=N)
    loss_fn = kf.NTXentLoss(detector=kf.StartAt(detector, epoch=2, update_from=1))
    found = []
    for epoch in range(3):
        loss_fn.set_progress(epoch, 3)
        loss_fn(*views())
        found.append((bool(detector.mean.any()), bool(loss_fn.stats.flagged)))
    assert found == [(False, False), (True, False), (True, True)]


class Answers(kf.Detector):
    """Answers what a function of the block returns."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def find(self, block: kf.Block) -> Any:
        return self.answer(block)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "a list": (
        lambda block: [kf.Kin()],
        TypeError,
        r"`find` must return a `Kin`, or a tuple of them; received \[Kin",
    ),
    "nothing": (lambda block: None, TypeError, r"`find` must return a `Kin`, .*; received None"),
    "no level": (lambda block: (), TypeError, r"`find` must return a `Kin`, .*; received \(\)"),
    "a tensor": (
        lambda block: block.sim_RC > 0,
        TypeError,
        r"`find` must return a `Kin`, .*; received tensor",
    ),
    "a level that is a tensor": (
        lambda block: (kf.Kin(), block.sim_RC > 0),
        TypeError,
        r"`find` must return a `Kin`, .*; received tensor",
    ),
    "kin of samples": (
        lambda block: kf.Kin(block.sim_RC[::2] > 0),
        ValueError,
        (
            r"`degree` of `Kin` \(=torch.bool \(6, 12\)\) must be bool or float of the shape \(12,"
            r" 12\)"
        ),
    ),
    "kin that would broadcast": (
        lambda block: kf.Kin(block.sim_RC[:, :1] > 0),
        ValueError,
        r"`degree` of `Kin` \(=torch.bool \(12, 1\)\) must be bool or float",
    ),
    "numbers": (
        lambda block: kf.Kin((block.sim_RC > 0).long()),
        ValueError,
        r"`degree` of `Kin` \(=torch.int64 \(12, 12\)\) must be bool or float",
    ),
    "kin as a list": (
        lambda block: kf.Kin((block.sim_RC > 0).tolist()),
        ValueError,
        r"`degree` of `Kin` \(=<class 'list'> \(\)\) must be bool or float",
    ),
    "ignored rows": (
        lambda block: kf.Kin(ignore=block.sim_RC[0] > 0),
        ValueError,
        r"`ignore` of `Kin` \(=torch.bool \(12,\)\) must be bool of the shape \(12, 12\)",
    ),
    "ignored to a degree": (
        lambda block: kf.Kin(ignore=block.sim_RC),
        ValueError,
        r"`ignore` of `Kin` \(=torch.float32 \(12, 12\)\) must be bool of the shape \(12, 12\)",
    ),
    "state of rows": (
        lambda block: kf.Kin(update={"mean": block.sim_RC.mean(1)}),
        ValueError,
        r"the update 'mean' \(=torch.Size\(\[12\]\)\) must have 6 rows, one per sample",
    ),
    "state of the batch": (
        lambda block: kf.Kin(update={"mean": block.sim_RC.mean()}),
        ValueError,
        r"the update 'mean' \(=torch.Size\(\[\]\)\) must have 6 rows, one per sample",
    ),
    "a number as state": (
        lambda block: kf.Kin(update={"mean": 0.5}),  # type: ignore[dict-item]
        ValueError,
        r"the update 'mean' \(=0.5\) must have 6 rows, one per sample",
    ),
}


def test_a_wrong_answer_gets_one_sentence() -> None:
    for (answer, kind, message), warm_up in itertools.product(WRONG.values(), (False, True)):
        detector: kf.Detector = Answers(answer)
        if warm_up:
            detector = kf.StartAt(detector, epoch=1, update_from=0)
        z1, z2, ids = views()
        with pytest.raises(kind, match=f"^{message}") as error:
            kf.NTXentLoss(detector=detector)(z1.float(), z2.float(), ids)
        assert "\n" not in str(error.value)[:80]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("action", ACTIONS)
def test_degrees_may_have_any_precision(action: Action, dtype: torch.dtype) -> None:
    z1, z2, ids = views()
    losses = [
        kf.NTXentLoss(
            detector=Answers(lambda block, to=to: kf.Kin(((block.sim_RC > 0.2) * 0.5).to(to))),
            action=action,
        )(z1.float(), z2.float(), ids)
        for to in (dtype, torch.float32)
    ]
    torch.testing.assert_close(*losses, check_dtype=True)
    grads = [torch.autograd.grad(loss, z1)[0] for loss in losses]
    torch.testing.assert_close(*grads)


def test_own_views_are_never_kin_whatever_the_answer() -> None:
    everything = Answers(lambda block: kf.Kin(torch.ones_like(block.sim_RC, dtype=torch.bool)))
    loss_fn = kf.NTXentLoss(detector=everything, action="attract")
    loss_fn(*views())
    assert int(loss_fn.stats.flagged) == 2 * B * (2 * B - 2)


NO_DETECTOR: dict[str, Any] = {
    "a name": "fnc",
    "a class": kf.FNC,
    "a function": lambda block: kf.Kin(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_no_detector_is_refused_by_every_loss(name: str) -> None:
    for given in NO_DETECTOR:
        kind, arguments = LOSSES[name]
        with pytest.raises(
            TypeError, match=r"^`detector` \(=.*\) must be a detector object, such as"
        ):
            kind(detector=NO_DETECTOR[given], **arguments)


@pytest.mark.parametrize("given", NO_DETECTOR)
def test_what_is_no_detector_is_refused_by_every_wrapper(given: str) -> None:
    for wrap in (kf.StartAt, kf.StopAt):
        with pytest.raises(TypeError, match=r"^`detector` \(=.*\) must be a detector"):
            wrap(NO_DETECTOR[given], epoch=1)


@pytest.mark.parametrize("name", LOSSES)
def test_a_detector_by_position_is_refused_not_ignored(name: str) -> None:
    kind, arguments = LOSSES[name]
    with pytest.raises(TypeError, match="positional argument"):
        kind(0.1, kf.FNC(top_k=3), **arguments)


def test_every_public_loss_is_in_the_table() -> None:
    def concrete(kind: Any) -> set[type]:
        found = {each for sub in kind.__subclasses__() for each in concrete(sub)}
        return found | (set() if inspect.isabstract(kind) else {kind})

    own = {kind for kind in concrete(Objective) if kind.__module__.startswith("kinfolk.")}
    public = {getattr(kf, name) for name in kf.__all__ if name.endswith("Loss")}
    assert own | public <= {kind for kind, _ in LOSSES.values()}
