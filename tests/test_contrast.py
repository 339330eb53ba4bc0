"""The engine: blocks and directions change nothing, gradients are exact, memory is linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kinfolk import contrast
from kinfolk.contrast import EMPTY, LogSumExp
from kinfolk.detectors import FNC, Detector, GloFND, Oracle
from kinfolk.objectives import (
    BimodalLoss,
    CLIPLoss,
    NTXentLoss,
    SigLIPLoss,
    SogCLRLoss,
)
from kinfolk.pairs import OUT, two_views
from tests.methods import DETECTORS, LOSSES, N
from tests.scripted import Scripted, everybody, same_class

GROUPS = torch.where(torch.arange(N) % 3 == 0, torch.arange(N) % 5, -1)
T: dict[str, Any] = {"temperature": 0.3}
ACTIONS = ("eliminate", "attract", "reweight")
MADE: dict[str, Callable[[], Detector | None]] = {
    **DETECTORS,
    "levels": lambda: Scripted(same_class(2), same_class(3)),
}
CHOSEN = ("none", "glofnd", "glofnd, shared", "glofnd, late", "guide, soft", "fnc, all", "levels")
CASES = [
    (loss, detector, ACTIONS[(i + j) % 3], (i + j) % 2 == 0)
    for i, loss in enumerate(LOSSES)
    for j, detector in enumerate((*CHOSEN, "ring, clusters", "oracle"))
    if (i + 2 * j) % 3 == 0 or detector in ("glofnd", "fnc, all")
]


def batch(seed: int, number: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    one, other = (
        torch.randn(number, 4, dtype=torch.float64, generator=g).requires_grad_() for _ in range(2)
    )
    return one, other, torch.randperm(N, generator=g)[:number]


def steps(loss_fn: Any, grouped: bool) -> dict[str, Any]:
    """Three steps, and one in evaluation: what they return and the state they leave."""
    out: dict[str, Any] = {"loss": [], "gradient": [], "counts": []}
    loss_fn.set_eval_labels(torch.arange(N) % 4)
    if grouped:
        loss_fn.set_groups(GROUPS)
    for step in range(4):
        loss_fn.set_progress(step // 2, 2)
        loss_fn.train(step < 3)
        one, other, ids = batch(step)
        loss = loss_fn(one, other, ids)
        out["loss"].append(loss)
        out["gradient"].append(torch.autograd.grad(loss, (one, other, *loss_fn.parameters())))
        out["counts"].append(loss_fn.stats.counts)
    out["state"] = dict(loss_fn.state_dict())
    return out


@pytest.mark.parametrize(("loss", "detector", "action", "grouped"), CASES)
def test_the_size_of_blocks_changes_nothing(
    loss: str, detector: str, action: Any, grouped: bool
) -> None:
    """Loss, gradient, counts and state; 7 rows are not a multiple of the views, 1 is less."""
    found = [
        steps(
            LOSSES[loss](
                detector=MADE[detector](),
                action=action,
                block_rows=rows,
                **T,
            ).double(),
            grouped,
        )
        for rows in (None, 7, 1)
    ]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-9, atol=1e-11, equal_nan=True)


@pytest.mark.parametrize("loss", ["clip", "bimodal", "fastclip"])
@pytest.mark.parametrize("detector", ["none", "glofnd", "fnc, all"])
def test_image_and_text_are_the_mean_of_their_directions(loss: str, detector: str) -> None:
    """Each direction called by itself, on its own pairs, has the same loss, gradient and state."""
    whole, parts = (LOSSES[loss](detector=DETECTORS[detector](), **T).double() for _ in range(2))
    assert isinstance(parts, BimodalLoss)
    for step in range(3):
        one, other, ids = batch(step)
        t = None if parts.learned is None else parts.learned()
        pairs = parts.pairs_of(one, other, ids, GROUPS[ids], parts.image)
        expected = (parts.image.on(pairs[0], t) + parts.text.on(pairs[1], t)) / 2
        found = whole(one, other, ids, GROUPS[ids])
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(
            torch.autograd.grad(found, (one, other)), torch.autograd.grad(expected, (one, other))
        )
    torch.testing.assert_close(dict(whole.state_dict()), dict(parts.state_dict()))


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("loss", ["clip", "siglip"])
def test_a_frozen_tower_leaves_the_other_s_gradient_as_it_is(loss: str, frozen: int) -> None:
    found = []
    for detached in (True, False):
        *towers, ids = batch(0)
        given = [z.detach() if detached and i == frozen else z for i, z in enumerate(towers)]
        value = LOSSES[loss](detector=FNC(top_k=2), **T)(*given, ids)
        found.append(torch.autograd.grad(value, towers[1 - frozen]))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("detector", [None, Oracle(torch.arange(N) % 3)])
@pytest.mark.parametrize("action", ["eliminate", "attract"])
def test_a_learned_temperature_in_one_block_and_in_several(
    detector: Detector | None, action: Any
) -> None:
    one, other, ids = batch(0, 7)
    found = []
    for block_rows in (None, 4):
        t = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        loss_fn = NTXentLoss(detector=detector, action=action, block_rows=block_rows)
        loss = loss_fn.on(two_views(one, other, ids), t)
        found.append((loss, *torch.autograd.grad(loss, (t, one, other))))
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(whole, parts, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("detector", ["none", "fnc", "fnc, all"])
def test_gradcheck_of_image_and_text(detector: str) -> None:
    images, texts, ids = (x[:5].detach() for x in batch(0))
    loss_fn = (
        CLIPLoss(temperature=0.4, detector=DETECTORS[detector](), block_rows=2).double().eval()
    )

    def at(scale: Tensor, *features: Tensor) -> Tensor:
        given = (*features, ids, GROUPS[ids])
        loss: Tensor = torch.func.functional_call(loss_fn, {"learned.logit_scale": scale}, given)
        return loss

    scale = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
    inputs = (scale, images.requires_grad_(), texts.requires_grad_())
    assert torch.autograd.gradcheck(at, inputs, fast_mode=True)


def test_a_pair_left_out_far_above_all_others_does_not_overflow() -> None:
    """exp(s / t) of a pair that text 0 leaves out is beyond float32 at this temperature."""
    images, texts = torch.eye(8, 9)[:4], torch.eye(8, 9)[4:]
    images[1] = texts[0]  # the one that text 0 leaves out
    found = []
    for dtype in (torch.float32, torch.float64):
        x = images.to(dtype, copy=True).requires_grad_()
        loss = CLIPLoss(temperature=0.01, detector=FNC(top_k=1)).to(dtype)(
            x, texts.to(dtype), torch.arange(4)
        )
        found.append((loss.double(), torch.autograd.grad(loss, x)[0].double()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_float32_agrees_with_float64() -> None:
    """The products of the two directions round differently; who is left out must not depend on
    it."""
    g = torch.Generator().manual_seed(0)
    themes = torch.randn(6, 64, generator=g)[torch.arange(192) % 6]
    images, texts = (
        F.normalize(themes + torch.randn(192, 64, generator=g), dim=1) for _ in range(2)
    )
    for make in (
        lambda: FNC(alpha=0.05),
        lambda: GloFND(num_samples=192, alpha=0.05, init="quantile"),
    ):
        found = []
        for dtype in (torch.float32, torch.float64):
            loss_fn = CLIPLoss(temperature=0.05, detector=make(), block_rows=50)
            x = images.to(dtype, copy=True).requires_grad_()
            loss = loss_fn(x, texts.to(dtype), torch.arange(192))
            found.append(torch.autograd.grad(loss, x)[0].double())
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["ntxent", "sogclr", "clip", "siglip", "fastclip"])
def test_a_second_derivative_is_refused(name: str) -> None:
    """The gradient is known when the loss is; differentiated again it would count as a constant."""
    one, other, ids = batch(0)
    with pytest.raises(
        RuntimeError, match="cannot be differentiated twice; leave out `create_graph`"
    ):
        torch.autograd.grad(LOSSES[name]()(one, other, ids), one, create_graph=True)


def test_a_backward_pass_can_be_repeated_and_scaled() -> None:
    one, other, ids = batch(0)
    loss = NTXentLoss()(one, other, ids)
    first, second = (
        torch.autograd.grad(factor * loss, one, retain_graph=True)[0] for factor in (1, -3)
    )
    torch.testing.assert_close(second, -3 * first)


@pytest.mark.parametrize("name", LOSSES)
def test_all_flagged_in_half_precision_at_a_low_temperature_is_finite(name: str) -> None:
    for action in ACTIONS:
        one, other, ids = batch(0)
        loss_fn = LOSSES[name](detector=Scripted(everybody), action=action, temperature=0.01)
        for dtype in (torch.bfloat16, torch.float16):
            views = [z.detach().to(dtype).requires_grad_() for z in (one, other)]
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = loss_fn(*views, ids)
            assert loss.dtype == torch.float32
            assert loss.isfinite()
            assert all(x.isfinite().all() for x in torch.autograd.grad(loss, views))
        for part in loss_fn.modules():
            if hasattr(part, "store"):
                assert part.store.rows[ids].isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_a_batch_without_negatives_is_finite(name: str) -> None:
    """One sample, and samples of one group."""
    one, other, ids = batch(0)
    for few in (1, 4):
        loss_fn = LOSSES[name](detector=FNC(top_k=2)).double()
        loss_fn.set_groups(torch.zeros(N, dtype=torch.int64))
        loss = loss_fn(one[:few], other[:few], ids[:few])
        assert loss.isfinite()
        assert all(x.isfinite().all() for x in torch.autograd.grad(loss, (one, other)))
        assert int(loss_fn.stats.negatives) == int(loss_fn.stats.flagged) == 0


# the log-sum-exp


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.005, 0.1, 3.0])
def test_the_log_sum_exp_and_its_gradient(temperature: float, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    sim = (torch.rand(7, 33, generator=g, dtype=dtype) * 2 - 1).requires_grad_()
    log_w = torch.rand(7, 33, generator=g, dtype=dtype).log()
    log_w[torch.arange(7), torch.arange(7)] = OUT
    t = torch.linspace(temperature, 2 * temperature, 7, dtype=dtype).requires_grad_()
    found: Tensor = LogSumExp.apply(log_w, sim, 1 / t.unsqueeze(1))  # type: ignore[no-untyped-call]
    expected = torch.logsumexp(sim / t.unsqueeze(1) + log_w, 1)
    rtol, atol = (1e-4, 1e-6) if dtype == torch.float32 else (1e-11, 1e-14)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    weights = torch.rand(7, generator=g, dtype=dtype)
    ours, theirs = (torch.autograd.grad(x @ weights, (sim, t)) for x in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


def test_gradcheck_of_the_log_sum_exp() -> None:
    sim = torch.rand(
        3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    inv_t = torch.tensor([[2.0], [5.0], [1.0]], dtype=torch.float64, requires_grad=True)
    log_w = torch.full((3, 5), -0.5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda s, i: LogSumExp.apply(log_w, s, i), (sim, inv_t))  # type: ignore[no-untyped-call]


def test_a_row_without_negatives_is_empty() -> None:
    sim = torch.stack((torch.zeros(5), torch.linspace(-1, 1, 5)))
    log_w = torch.stack((torch.full((5,), OUT), torch.zeros(5)))
    lse = LogSumExp.apply(log_w, sim, torch.full((2, 1), 100.0))  # type: ignore[no-untyped-call]
    assert lse[0] < EMPTY < lse[1]


# memory


class Memory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The largest number of bytes that the results of operations hold at one time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = self.sum = 0

    def now(self) -> int:
        self.held = {key: each for key, each in self.held.items() if not each[0].expired()}  # type: ignore[no-untyped-call]
        self.sum = sum(size for _, size in self.held.values())
        return self.sum

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self.held[reference.cdata] = (reference, storage.nbytes())
                self.sum += storage.nbytes()
        if self.sum > self.most:  # an upper bound, so look closer
            self.most = max(self.most, self.now())
        return found


@pytest.mark.parametrize(
    "make",
    [
        lambda: NTXentLoss(detector=GloFND(num_samples=2048, alpha=0.1)),
        lambda: SogCLRLoss(num_samples=2048, detector=FNC(top_k=3), action="attract"),
        lambda: CLIPLoss(prior=0.1, detector=Oracle(torch.arange(2048) % 9), action="reweight"),
        lambda: SigLIPLoss(),
    ],
)
def test_memory_is_linear_in_the_batch(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No matrix of anchors × candidates outlives its block, neither in the step nor after it."""
    monkeypatch.setitem(contrast.BLOCK_ENTRIES, "cpu", 1 << 11)
    most, after = [], []
    for number in (64, 128):
        one, other = torch.randn(2, number, 4, generator=torch.Generator().manual_seed(0))
        with Memory() as memory:
            loss = make()(one.requires_grad_(), other.requires_grad_(), torch.arange(number))
            after.append(memory.now())
            loss.backward()
        most.append(memory.most)
    block = 4 * (1 << 11)
    assert most[1] < 20 * block
    assert most[1] < 1.5 * most[0], "four times the similarities"
    assert after[1] <= 2.1 * after[0]
