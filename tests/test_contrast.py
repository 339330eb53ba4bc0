"""Both directions in three or four products equal each by itself: losses, gradient, state and counts. A batch with itself takes two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kinfolk import contrast, kinship
from kinfolk.detectors import FNC, Detector, GloFND, Oracle, StartAt
from kinfolk.objectives import Bimodal, BimodalSogCLR, CLIPLoss, FastCLIP, NTXent, SigLIPLoss, bimodal
from kinfolk.objectives.base import unit
from kinfolk.pairs import Action, two_views

N = 24
GROUPS = torch.where(torch.arange(N) % 3 == 0, torch.arange(N) % 5, -1)

LOSSES: dict[str, Callable[..., Bimodal[Any]]] = {
    "clip": lambda **given: CLIPLoss(0.3, **given),
    "fixed": lambda **given: CLIPLoss(0.3, learnable=False, **given),
    "sogclr": lambda **given: BimodalSogCLR(N, 0.3, 0.7, None, **given),
    "fastclip": lambda **given: FastCLIP(N, 0.3, 1.5, 0.7, None, 0.1, **given),
}
DETECTORS: dict[str, Callable[[], Detector | None]] = {
    "none": lambda: None,
    "glofnd": lambda: GloFND(N, alpha=0.2, init="quantile"),
    "shared": lambda: GloFND(N, alpha=0.2, rule="adam", init="quantile", shared=True),
    "late": lambda: StartAt(GloFND(N, alpha=0.2, init="quantile"), epoch=1, update_from=0),
    "fnc": lambda: FNC(top_k=2),
    "all": lambda: FNC(min_similarity=-1.0),
}


def batch(seed: int, twins: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Images, texts and ids; with `twins` all images are alike but two, so that similarities tie."""
    g = torch.Generator().manual_seed(seed)
    images, texts = (torch.randn(10, 4, dtype=torch.float64, generator=g) for _ in range(2))
    if twins:
        images[2:] = images[1]
    return images.requires_grad_(), texts.requires_grad_(), torch.randperm(N, generator=g)[:10]


def steps(loss_fn: Bimodal[Any], grouped: bool, twins: bool = False) -> dict[str, Any]:
    """Three steps, and one in evaluation: what they give and leave behind."""
    out: dict[str, Any] = {"loss": [], "gradient": [], "counts": []}
    for step in range(4):
        loss_fn.set_progress(step // 2, 2)
        loss_fn.train(step < 3)
        images, texts, ids = batch(step, twins)
        loss = loss_fn(images, texts, ids, GROUPS[ids] if grouped else None)
        out["loss"].append(loss)
        out["gradient"].append(torch.autograd.grad(loss, (images, texts, *loss_fn.parameters())))
        out["counts"].append([objective.stats.counts() for objective in loss_fn.objectives])
    out["state"] = dict(loss_fn.state_dict())
    return out


def keep(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """Whether one direction keeps its similarities for the other."""
    monkeypatch.setattr(contrast, "_KEPT_ELEMENTS", {"default": 1 << 24 if kept else 0})


def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each direction by itself from now on."""
    monkeypatch.setattr(bimodal, "crosses", lambda work: False)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("detector", DETECTORS)
@pytest.mark.parametrize(("grouped", "block_rows", "kept"), [(False, None, True), (False, None, False), (True, 3, True), (True, 3, False)])
def test_together_equals_apart(
    monkeypatch: pytest.MonkeyPatch, name: str, detector: str, grouped: bool, block_rows: int | None, kept: bool
) -> None:
    keep(monkeypatch, kept)
    made = [LOSSES[name](detector=DETECTORS[detector](), block_rows=block_rows).double() for _ in range(2)]
    together = steps(made[0], grouped)
    apart(monkeypatch)
    torch.testing.assert_close(together, steps(made[1], grouped))


@pytest.mark.parametrize("min_negatives", [1, 3, 20])
@pytest.mark.parametrize("watched", [False, True])
def test_spared_negatives_are_those_of_the_other_direction(monkeypatch: pytest.MonkeyPatch, min_negatives: int, watched: bool) -> None:
    """Only the spared ones are left, and ties among them are broken once."""
    made = [CLIPLoss(0.3, detector=FNC(min_similarity=-1.0), min_negatives=min_negatives, block_rows=4).double() for _ in range(2)]
    if watched:
        for loss_fn in made:
            loss_fn.set_eval_labels(torch.arange(N) % 3)
    together = steps(made[0], False, twins=True)
    apart(monkeypatch)
    torch.testing.assert_close(together, steps(made[1], False, twins=True))


@pytest.mark.parametrize("frozen", [0, 1])
def test_one_frozen_tower(monkeypatch: pytest.MonkeyPatch, frozen: int) -> None:
    found = []
    for _ in range(2):
        *features, ids = batch(0)
        features[frozen] = features[frozen].detach()
        loss = CLIPLoss(0.3, learnable=False, detector=FNC(top_k=2))(*features, ids)
        found.append(torch.autograd.grad(loss, features[1 - frozen]))
        apart(monkeypatch)
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("detector", ["none", "fnc", "all"])
def test_gradcheck(detector: str) -> None:
    images, texts, ids = (x[:5] for x in batch(0))
    images, texts = images.detach().requires_grad_(), texts.detach().requires_grad_()
    loss_fn = CLIPLoss(0.4, detector=DETECTORS[detector](), block_rows=2).double().eval()

    def at(scale: Tensor, *features: Tensor) -> Tensor:
        loss: Tensor = torch.func.functional_call(loss_fn, {"learned.logit_scale": scale}, (*features, ids, GROUPS[ids]))
        return loss

    assert torch.autograd.gradcheck(at, (torch.tensor(0.9, dtype=torch.float64, requires_grad=True), images, texts), fast_mode=True)


def test_a_pair_left_out_far_above_all_others_does_not_overflow() -> None:
    """exp(s / t − lse) of a pair that text 0 leaves out is beyond float32 at this temperature."""
    images, texts = torch.eye(8, 9)[:4], torch.eye(8, 9)[4:]
    images[1] = texts[0]  # the one that text 0 leaves out
    images.requires_grad_()
    loss = CLIPLoss(0.01, detector=FNC(top_k=1))(images, texts, torch.arange(4))
    loss.backward()
    precise = images.detach().double().requires_grad_()
    exact = CLIPLoss(0.01, detector=FNC(top_k=1)).double()(precise, texts.double(), torch.arange(4))
    exact.backward()
    torch.testing.assert_close(loss.double(), exact)
    assert images.grad is not None
    torch.testing.assert_close(images.grad.double(), precise.grad, rtol=1e-4, atol=1e-4)


def test_float32_agrees_with_float64() -> None:
    """The two directions' products round differently; who is left out must not depend on it."""
    g = torch.Generator().manual_seed(0)
    themes = torch.randn(6, 64, generator=g)[torch.arange(192) % 6]
    images, texts = (F.normalize(themes + torch.randn(192, 64, generator=g), dim=1) for _ in range(2))
    for make in (lambda: FNC(fraction=0.05), lambda: GloFND(192, alpha=0.05, init="quantile")):
        found = []
        for dtype in (torch.float32, torch.float64):
            loss_fn = CLIPLoss(0.05, detector=make(), block_rows=50)
            x = images.to(dtype, copy=True).requires_grad_()
            loss_fn(x, texts.to(dtype), torch.arange(192)).backward()
            assert x.grad is not None
            found.append(x.grad.double())
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-7)


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the multiplications of matrices of the batch's size."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(
    ("detector", "action", "crosses"),
    [
        (None, "eliminate", True),
        (FNC(top_k=1), "eliminate", True),
        (FNC(top_k=1), "attract", False),
        (Oracle(torch.arange(N)), "eliminate", False),
    ],
)
def test_fewer_products_where_a_level_says_who_is_left_out(
    monkeypatch: pytest.MonkeyPatch, detector: Detector | None, action: Action, crosses: bool, kept: bool
) -> None:
    """Four for both directions instead of six, and three where the similarities are kept from one to the other."""
    keep(monkeypatch, kept)
    images, texts, ids = batch(0)
    with Products() as products:  # type: ignore[no-untyped-call]
        CLIPLoss(0.3, detector=detector, action=action)(images, texts, ids).backward()
    assert products.number == (6 if not crosses else 3 if kept else 4)


@pytest.mark.parametrize("detector", [None, Oracle(torch.arange(N) % 3)])
@pytest.mark.parametrize("action", ["eliminate", "attract"])
def test_a_batch_with_itself_in_one_block_equals_several(detector: Detector | None, action: Action) -> None:
    """The gradient by anchors and candidates is one product there; that by a learned temperature is taken from it too."""
    g = torch.Generator().manual_seed(0)
    one, other, ids = *torch.randn(2, 7, 4, dtype=torch.float64, generator=g), torch.arange(7)
    found = []
    for block_rows in (None, 4):
        views, t = [z.clone().requires_grad_() for z in (one, other)], torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        loss = NTXent(0.3, detector=detector, action=action, block_rows=block_rows).on(two_views(views[0], views[1], ids, unit), t)
        loss.backward()  # type: ignore[no-untyped-call]
        found.append((loss, t.grad, *(z.grad for z in views)))
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(whole, parts, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("block_rows", "number"), [(None, 2), (4, 6)])
def test_a_batch_with_itself_in_one_block_takes_two_products(block_rows: int | None, number: int) -> None:
    views = [z.requires_grad_() for z in torch.randn(2, 4, 3)]
    with Products() as counted:  # type: ignore[no-untyped-call]
        NTXent(0.3, block_rows=block_rows)(*views).backward()
    assert counted.number == number


def test_views_become_unit_vectors_and_their_gradients_are_contiguous() -> None:
    views = [z.requires_grad_() for z in torch.randn(2, 5, 3, dtype=torch.float64)]
    factor = torch.randn(5, 2, 3, dtype=torch.float64)
    expected = torch.autograd.grad((F.normalize(torch.stack(views, 1), dim=-1) * factor).sum(), views)
    found = torch.autograd.grad((unit(*views) * factor).sum(), views)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
        assert one.is_contiguous()


@pytest.mark.parametrize("make", [lambda: NTXent(0.3), lambda: CLIPLoss(0.3), lambda: SigLIPLoss(0.3)])
def test_a_second_derivative_is_refused(make: Callable[[], Callable[[Tensor, Tensor], Tensor]]) -> None:
    """The gradient was taken by hand; differentiated again it would count as a constant."""
    images, texts, _ = batch(0)
    with pytest.raises(RuntimeError, match="leave `create_graph` out"):
        torch.autograd.grad(make()(images, texts), images, create_graph=True)


@pytest.mark.parametrize("kept", [True, False])
def test_the_only_negative_is_spared_in_both_directions(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """As on an accelerator, where all candidates are above the level; the two directions' products round differently."""
    g = torch.Generator().manual_seed(0)
    images, texts = (torch.randn(150, 37, dtype=torch.float64, generator=g).requires_grad_() for _ in range(2))
    keep(monkeypatch, kept)
    monkeypatch.setattr(kinship, "looks", lambda sim_RC: False)
    found = []
    for _ in range(2):
        loss = CLIPLoss(0.3, detector=FNC(min_similarity=-1.0), block_rows=17).double()(images, texts, torch.arange(150))
        found.append(torch.autograd.grad(loss, (images, texts)))
        apart(monkeypatch)
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)
