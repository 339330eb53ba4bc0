"""What all losses share: ids, wrong inputs, a given temperature, groups, state in a backward
pass."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import kinfolk as kf
from kinfolk.detectors import (
    FNC,
    IFND,
    Cave,
    Detector,
    GloFND,
    Hierarchy,
    Known,
    Neighbours,
    Oracle,
    Ring,
)
from kinfolk.frameworks import IR, LA, NNCLR, PCL, RCL, SPCL, MoCo
from kinfolk.objectives import (
    BimodalSogCLRLoss,
    CLIPLoss,
    FastCLIPLoss,
    LocalAggregationLoss,
    NTXentLoss,
    Objective,
    RelativeContrastLoss,
    SigLIPLoss,
    SogCLRLoss,
)
from kinfolk.pairs import Pairs, two_views
from tests.scripted import Scripted, same_class

LOSSES: dict[str, Objective] = {
    "ntxent": NTXentLoss(temperature=0.2),
    "sogclr": SogCLRLoss(num_samples=8, temperature=0.2),
    "relative": RelativeContrastLoss(temperature=0.2),
    "la": LocalAggregationLoss(temperature=0.2),
}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.complex64]
)
def test_ids_that_are_no_integers_are_refused(dtype: torch.dtype) -> None:
    """0.5 would become 0, and in float32 the ids 2²⁴ and 2²⁴ + 1 are one."""
    z, ids = F.normalize(torch.randn(2, 4), dim=1), torch.tensor([0, 1])
    message = rf"`ids` \(={dtype}\) must be an integer tensor"
    for loss_fn in LOSSES.values():
        with pytest.raises(ValueError, match=message):
            loss_fn(z, z, ids.to(dtype))
        with pytest.raises(ValueError, match=message):
            loss_fn.on(Pairs(z, z, z.unsqueeze(1), ids.to(dtype), ids))
        with pytest.raises(
            ValueError, match=rf"`candidate_ids` \(={dtype}\) must be an integer tensor"
        ):
            loss_fn.on(Pairs(z, z, z.unsqueeze(1), ids, ids.to(dtype)))
    with pytest.raises(ValueError, match=message):
        CLIPLoss()(z, z, ids.to(dtype))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_ids_of_any_integer_type_are_the_same_ids(dtype: torch.dtype) -> None:
    z, ids = torch.randn(4, 5), torch.tensor([3, 1, 0, 3])
    loss_fn = NTXentLoss(temperature=0.2, detector=Oracle(torch.tensor([0, 1, 1, 0])))
    assert torch.equal(loss_fn(z, -z, ids.to(dtype)), loss_fn(z, -z, ids))
    given = [Pairs(z, z, -z.unsqueeze(1), each, each) for each in (ids.to(dtype), ids)]
    assert torch.equal(loss_fn.on(given[0]), loss_fn.on(given[1]))


@pytest.mark.parametrize("name", ["ntxent", "relative", "la"])
@pytest.mark.parametrize("action", ["eliminate", "attract", "reweight"])
def test_a_given_temperature_replaces_the_own_everywhere(name: str, action: Any) -> None:
    kind = type(LOSSES[name])
    g = torch.Generator().manual_seed(0)
    z, queue, keys = (
        torch.randn(*shape, 5, generator=g, dtype=torch.float64) for shape in ((4,), (9,), (4, 2))
    )
    degree = (
        torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand(4, 2) if name == "relative" else None
    )
    pairs = Pairs(
        z.requires_grad_(),
        queue.requires_grad_(),
        keys,
        torch.arange(4),
        torch.arange(9) + 2,
        degree=degree,
    )
    given = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    own, other = (
        kind(temperature=t, detector=Scripted(same_class(3)), action=action, block_rows=3)
        for t in (0.3, 0.9)
    )
    torch.testing.assert_close(other.on(pairs, given), own.on(pairs))
    assert torch.autograd.gradcheck(
        lambda *inputs: other.on(
            replace(pairs, anchors=inputs[0], candidates=inputs[1]), inputs[2]
        ),
        (z, queue, given),
    )


GROUPS = torch.tensor([0, 0, 2, 3, 2, 5, 0, 7])


def test_groups_of_the_batch_are_no_negatives() -> None:
    torch.manual_seed(0)
    z1, z2 = F.normalize(torch.randn(2, 6, 4), dim=-1)
    ids = torch.tensor([0, 1, 3, 5, 6, 7])
    loss_fn = NTXentLoss(temperature=0.2)
    loss_fn.set_groups(GROUPS)
    pairs = two_views(z1, z2, ids)
    given = replace(pairs, groups=GROUPS[ids], candidate_groups=GROUPS[pairs.candidate_ids])
    assert torch.equal(loss_fn(z1, z2, ids), NTXentLoss(temperature=0.2).on(given))
    assert int(loss_fn.stats.negatives) == 12 * 10 - 3 * 2 * 4, "0, 1 and 6 are of one group"
    assert not torch.equal(loss_fn(z1, z2, ids), NTXentLoss(temperature=0.2)(z1, z2, ids))
    assert not [name for name in loss_fn.state_dict() if "groups" in name], "data, not state"
    with pytest.raises(ValueError, match="`ids` must be given"):
        loss_fn(z1, z2)


def test_groups_of_the_queue_are_no_negatives() -> None:
    torch.manual_seed(0)
    anchors, queue = F.normalize(torch.randn(2, 4), dim=-1), F.normalize(torch.randn(8, 4), dim=-1)
    ids, queue_ids = torch.tensor([1, 5]), torch.tensor([0, 1, 2, 3, 4, 5, 6, 7])
    loss_fn = NTXentLoss(temperature=0.2)
    loss_fn.set_groups(GROUPS)
    found = loss_fn.on(Pairs(anchors, queue, anchors.unsqueeze(1), ids, queue_ids, unit=True))
    kept = [queue[[2, 3, 4, 5, 7]], queue[[0, 1, 2, 3, 4, 6, 7]]]
    expected = [
        torch.logsumexp(torch.cat((torch.ones(1), own @ z)) / 0.2, 0) - 1 / 0.2
        for own, z in zip(kept, anchors, strict=True)
    ]
    torch.testing.assert_close(found, torch.stack(expected).mean())


def test_groups_of_the_queue_are_no_negatives_in_training() -> None:
    torch.manual_seed(0)
    groups = torch.arange(40) // 2
    moco = MoCo(nn.Flatten(), nn.Linear(12, 4), num_samples=40, queue_size=8)
    moco.set_groups(groups)
    for ids in (torch.arange(0, 16, 2), torch.arange(1, 17, 2)):
        moco(torch.randn(2, 8, 3, 2, 2), ids)
    assert int(moco.stats.negatives) == 8 * 7, (
        "of each anchor's eight candidates, keys of the other rows, one is of its group"
    )


def test_a_group_below_zero_is_no_group() -> None:
    """As in image-text losses."""
    z1, z2 = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    losses = []
    for groups in ([7, -1, 7, -1, -1], [7, 8, 7, 9, 10]):
        loss_fn = NTXentLoss(temperature=0.2)
        loss_fn.set_groups(torch.tensor(groups))
        losses.append(loss_fn(z1, z2, torch.arange(5)))
    assert torch.equal(losses[0], losses[1])


IMAGE_TEXT: dict[str, Callable[[], Any]] = {
    "clip": CLIPLoss,
    "siglip": SigLIPLoss,
    "sogclr": lambda: BimodalSogCLRLoss(num_samples=8),
    "fastclip": lambda: FastCLIPLoss(num_samples=8),
}
TWO_VIEWS: dict[str, Callable[[], Any]] = {
    "ntxent": NTXentLoss,
    "sogclr": lambda: SogCLRLoss(num_samples=8),
    "la": LocalAggregationLoss,
}
CALLED = {**TWO_VIEWS, **{f"image-text {name}": make for name, make in IMAGE_TEXT.items()}}


@pytest.mark.parametrize("name", CALLED)
def test_a_wrong_input_is_one_sentence(name: str) -> None:
    z, ids, loss_fn = torch.randn(4, 5), torch.arange(4), CALLED[name]()
    with pytest.raises(
        TypeError, match=r"`ids` \(=list\) must be an integer tensor: torch.as_tensor\(ids\)"
    ):
        loss_fn(z, z, [0, 1, 2, 3])
    with pytest.raises(ValueError, match=r"`ids` \(=torch.float32\) must be an integer tensor"):
        loss_fn(z, z, ids.float())
    with pytest.raises(ValueError, match="embeddings must be real numbers; received complex ones"):
        loss_fn(z.to(torch.complex64), z.to(torch.complex64), ids)
    with pytest.raises(ValueError, match=r"must have (one|the) shape"):
        loss_fn(z, z[:3], ids)


@pytest.mark.parametrize("name", CALLED)
@pytest.mark.parametrize("table", ["set_eval_labels", "set_groups"])
def test_ids_beyond_labels_or_groups_are_refused(name: str, table: str) -> None:
    z, loss_fn = torch.randn(4, 5), CALLED[name]()
    getattr(loss_fn, table)(torch.zeros(7, dtype=torch.int64))
    for wrong in (-1, 7):
        words = rf"`ids` \(={wrong}\) must be in \[0, 7\): the number of samples of `{table}`"
        with pytest.raises(ValueError, match=words):
            loss_fn(z, z, torch.tensor([0, wrong, 1, 2]))
    assert loss_fn(z, z, torch.tensor([0, 6, 1, 2])).isfinite()
    with pytest.raises(ValueError, match="`ids` must be given"):
        loss_fn(z, z)


@pytest.mark.parametrize("table", ["set_eval_labels", "set_groups"])
def test_labels_and_groups_are_integers_one_for_each_sample(table: str) -> None:
    for loss_fn in (NTXentLoss(), CLIPLoss()):
        setter, name = getattr(loss_fn, table), table.split("_")[-1]
        with pytest.raises(TypeError, match=rf"`{name}` \(=list\) must be an integer tensor"):
            setter([0, 1, 2])
        with pytest.raises(
            ValueError, match=rf"`{name}` \(=torch.float32\) must be an integer tensor"
        ):
            setter(torch.zeros(3))
        with pytest.raises(
            ValueError, match=rf"`{name}` \(=\(3, 1\)\) must be of the shape \(samples,\)"
        ):
            setter(torch.zeros(3, 1, dtype=torch.int64))


def test_ids_of_pairs_are_tensors() -> None:
    z, ids = torch.randn(4, 5), torch.arange(4)
    with pytest.raises(TypeError, match=r"`candidate_ids` \(=list\) must be an integer tensor"):
        Pairs(z, z, z.unsqueeze(1), ids, [0, 1, 2, 3])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", IMAGE_TEXT)
@pytest.mark.parametrize("precise", [0, 1])
def test_one_tower_in_double_precision_is_both(name: str, precise: int) -> None:
    g = torch.Generator().manual_seed(0)
    towers = [torch.randn(6, 5, generator=g).requires_grad_() for _ in range(2)]
    mixed = [z.double() if i == precise else z for i, z in enumerate(towers)]
    found = []
    for given in (mixed, [z.double() for z in towers]):
        loss = IMAGE_TEXT[name]().double()(*given, torch.arange(6))
        assert loss.dtype == torch.float64
        found.append((loss, torch.autograd.grad(loss, towers)))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1])  # of float32 leaves, so to their rounding


COUNTED: dict[str, Callable[[Any], object]] = {
    "SogCLRLoss": lambda n: SogCLRLoss(num_samples=n),
    "BimodalSogCLRLoss": lambda n: BimodalSogCLRLoss(num_samples=n),
    "FastCLIPLoss": lambda n: FastCLIPLoss(num_samples=n),
    "GloFND": lambda n: GloFND(num_samples=n, alpha=0.1),
    "IFND": lambda n: IFND(num_samples=n, num_clusters=(3,)),
    "Cave": lambda n: Cave(num_samples=n, num_clusters=3),
    "Ring": lambda n: Ring(num_samples=n, lower=0.3, upper=0.8, num_clusters=3),
    "Neighbours": lambda n: Neighbours(num_samples=n, num_clusters=3),
    "Hierarchy": lambda n: Hierarchy(num_samples=n),
    "Known": lambda n: Known(torch.tensor([[0, 1]]), num_samples=n),
    **{
        method.__name__: partial(method, nn.Linear(4, 4), nn.Linear(4, 4))
        for method in (IR, LA, NNCLR, PCL, RCL, SPCL, MoCo)
    },
}


def test_num_samples_is_an_int() -> None:
    for name, number in itertools.product(COUNTED, (8.0, True, "8")):
        with pytest.raises(TypeError, match=rf"`num_samples` \(={number!r}\) must be an int"):
            pytest.fail(f"{name} takes {COUNTED[name](number)}")


def test_a_detector_is_an_object_and_everything_is_given_by_name() -> None:
    for wrong in ("fnc", FNC):
        with pytest.raises(
            TypeError, match=r"must be a detector object, such as kf.FNC\(top_k=3\)"
        ):
            NTXentLoss(detector=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="positional argument"):
        NTXentLoss(0.1, FNC(top_k=3))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'detectr'"):
        NTXentLoss(detectr=FNC(top_k=3))  # type: ignore[call-arg]


def test_a_share_for_the_positives_is_that_of_the_equation() -> None:
    """SogCLR with attracted kin and `own_weight` λ: λ s_pos + (1 − λ) mean over kin."""
    z1, z2 = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    settings: dict[str, Any] = {
        "temperature": 0.3,
        "detector": Scripted(same_class(4)),
        "action": "attract",
    }
    shared, mean = (
        SogCLRLoss(num_samples=6, own_weight=w, **settings).double() for w in (0.3, None)
    )
    z, ids = F.normalize(torch.stack((z1, z2), 1).flatten(0, 1), dim=1), torch.arange(12) // 2
    pulls = [[], []]  # type: ignore[var-annotated]
    for i in range(12):
        own, kin = (
            z[i] @ z[i ^ 1],
            [z[i] @ z[j] for j in range(12) if ids[j] != ids[i] and ids[j] % 4 == ids[i] % 4],
        )
        pulls[0].append(0.3 * own + 0.7 * sum(kin) / len(kin) if kin else own)
        pulls[1].append((own + sum(kin)) / (1 + len(kin)))
    expected = -torch.stack(pulls[0]).mean() + torch.stack(pulls[1]).mean()
    found = shared(z1, z2, torch.arange(6)) - mean(z1, z2, torch.arange(6))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


STATEFUL: dict[str, Callable[[], nn.Module]] = {
    "u": lambda: SogCLRLoss(num_samples=8, block_rows=6),
    "thresholds": lambda: NTXentLoss(detector=GloFND(num_samples=8, alpha=0.2), block_rows=6),
    "two directions": lambda: BimodalSogCLRLoss(num_samples=8, decay_epochs=None),
    "collected": lambda: NTXentLoss(detector=IFND(num_samples=8, num_clusters=(3,), source="bank")),
}
STATELESS: dict[str, Callable[[], nn.Module]] = {
    "fnc": lambda: NTXentLoss(detector=FNC(top_k=2), block_rows=6),
    "learned temperature": CLIPLoss,
    "evaluation": lambda: SogCLRLoss(num_samples=8).eval(),
}


def checkpointed(
    loss_fn: nn.Module, reentrant: bool | None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss and gradient of the second of two steps, and the state after them."""
    encoder, ids = nn.Linear(6, 4), torch.arange(8)
    nn.init.orthogonal_(encoder.weight, generator=torch.Generator().manual_seed(5))
    nn.init.zeros_(encoder.bias)

    def call(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = loss_fn(encoder(x), encoder(y), ids)
        return loss

    for step in range(2):
        x, y = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(step))
        x.requires_grad_()
        loss = call(x, y) if reentrant is None else checkpoint(call, x, y, use_reentrant=reentrant)
        encoder.zero_grad()
        loss.backward()
    assert encoder.weight.grad is not None
    return (
        loss.detach(),
        encoder.weight.grad,
        {name: x.clone() for name, x in loss_fn.state_dict().items()},
    )


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("early_stop", [True, False])
def test_a_checkpoint_never_computes_a_gradient_from_changed_state(
    name: str, early_stop: bool
) -> None:
    """It computes the loss a second time, in the backward pass: refused, unless it stops before
    it."""
    words = r"Loss is called again in a backward pass, as by torch.utils.checkpoint, but its state"
    with pytest.raises(RuntimeError, match=words):
        checkpointed(STATEFUL[name](), reentrant=True)
    with set_checkpoint_early_stop(early_stop):
        if early_stop and name != "two directions":
            found = checkpointed(STATEFUL[name](), reentrant=False)
            torch.testing.assert_close(found, checkpointed(STATEFUL[name](), None), rtol=0, atol=0)
        else:
            with pytest.raises(RuntimeError, match=words):
                checkpointed(STATEFUL[name](), reentrant=False)


@pytest.mark.parametrize("name", STATELESS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_a_loss_without_state_changes_nothing(
    name: str, reentrant: bool
) -> None:
    found, plain = (checkpointed(STATELESS[name](), mode) for mode in (reentrant, None))
    torch.testing.assert_close(found, plain, rtol=0, atol=0)


@pytest.mark.parametrize("make", [lambda d: NTXentLoss(detector=d), lambda d: CLIPLoss(detector=d)])
def test_another_thread_reads_complete_counts_during_a_step(
    make: Callable[[Detector], Any],
) -> None:
    """All steps have the same counts here, and so has every moment between them."""
    loss_fn = make(Oracle(torch.arange(6) % 2))
    loss_fn.set_eval_labels(torch.arange(6) % 3)
    z, ids, seen, stop = torch.randn(2, 6, 4), torch.arange(6), [], threading.Event()
    loss_fn(z[0], z[1], ids)
    one_step = loss_fn.stats.counts.tolist()[:5]

    def read() -> None:
        while not stop.is_set():
            stats = loss_fn.stats
            seen.append((stats.counts.tolist()[:5], stats.detection()))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(30):
            loss_fn(z[0], z[1], ids)
    finally:
        stop.set()
        reader.join()
    assert seen
    assert all(counts == one_step for counts, _ in seen)


def test_the_public_names_are_there() -> None:
    for name in ("NTXentLoss", "SogCLRLoss", "CLIPLoss", "Detector", "Kin", "Block"):
        assert hasattr(kf, name), name
