from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

import kinfolk as kf
from kinfolk.detectors import Guide, Oracle
from kinfolk.errors import KinfolkError, UsageError
from kinfolk.frameworks.registry import Context, build_detector, detector_arguments, parse
from kinfolk.objectives import CLIPLoss, NTXentLoss, SogCLRLoss
from kinfolk.pairs import ACTIONS, OUT, Action, Block
from tests.detectors.blocks import kin, random_block
from tests.reference.guide import soft_targets, weighted_attraction

N, B = 12, 7


def views(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    z1, z2 = (
        torch.randn(B, 5, dtype=torch.float64, generator=g).requires_grad_() for _ in range(2)
    )
    return z1, z2, torch.randperm(N, generator=g)[:B]


def features(seed: int = 5) -> Tensor:
    return torch.randn(N, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def require_equal(ours: Tensor, slow: Tensor, *inputs: Tensor) -> None:
    torch.testing.assert_close(ours, slow)
    for a, b in zip(
        torch.autograd.grad(ours, inputs), torch.autograd.grad(slow, inputs), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("block_rows", [None, 4])
def test_one_hot_labels_are_the_oracle(action: Action, block_rows: int | None) -> None:
    z1, z2, ids = views()
    labels = torch.arange(N) % 3
    guided = NTXentLoss(
        temperature=0.3,
        detector=Guide(torch.eye(3)[labels], margin=0.5),
        action=action,
        block_rows=block_rows,
    )
    known = NTXentLoss(
        temperature=0.3, detector=Oracle(labels), action=action, block_rows=block_rows
    )
    require_equal(guided(z1, z2, ids), known(z1, z2, ids), z1, z2)
    assert torch.equal(guided.stats.counts[:3], known.stats.counts[:3])


@pytest.mark.parametrize("block_rows", [None, 4])
@pytest.mark.parametrize("own_weight", [None, 0.0, 0.5])
def test_soft_attraction_is_the_cross_entropy_to_the_guides_softmax(
    block_rows: int | None, own_weight: float | None
) -> None:
    z1, z2, ids = views()
    unit = F.normalize(features(), dim=1)[ids]
    guide = Guide(features() * 3, temperature=0.4)
    loss_fn = NTXentLoss(
        temperature=0.3,
        detector=guide,
        action="attract",
        own_weight=own_weight,
        block_rows=block_rows,
    )
    require_equal(
        loss_fn(z1, z2, ids), soft_targets(z1, z2, unit @ unit.T, 0.3, 0.4, own_weight), z1, z2
    )


def test_alpha_takes_the_highest_similarities_of_each_row_but_its_own() -> None:
    sim = torch.zeros(3, N)
    ids, all_ids = torch.tensor([2, 7, 11]), torch.arange(N)
    sim[torch.arange(3), ids] = OUT
    block = Block(sim, ids, all_ids, 1, torch.full((3,), N - 1))
    found = kin(Guide(features(), alpha=0.25), block)
    unit = F.normalize(features(), dim=1)
    for row, anchor in enumerate(ids.tolist()):
        nearest = sorted(
            (j for j in range(N) if j != anchor), key=lambda j: -float(unit[anchor] @ unit[j])
        )[:3]
        assert found[row].nonzero().flatten().tolist() == sorted(nearest)


def test_the_margin_is_below_the_similarity_to_the_positive() -> None:
    z1, z2, ids = views()
    unit = F.normalize(features(), dim=1)[ids]
    near = (unit @ unit.T > 1 - 0.6) & ~torch.eye(B, dtype=torch.bool)
    loss_fn = NTXentLoss(temperature=0.3, detector=Guide(features(), margin=0.6))
    loss_fn(z1, z2, ids)
    assert int(loss_fn.stats.flagged) == 4 * int(near.sum()) > 0


def test_degrees_are_factors_of_reweight() -> None:
    """A guide that finds all samples equal leaves nothing of the negatives but the positive's own
    share."""
    z1, z2, ids = views()
    same = NTXentLoss(
        temperature=0.3, detector=Guide(torch.ones(N, 2), temperature=0.1), action="reweight"
    )(z1, z2, ids)
    assert same.item() == pytest.approx(0, abs=1e-12)
    apart = NTXentLoss(
        temperature=0.3, detector=Guide(torch.eye(N), temperature=0.01), action="reweight"
    )(z1, z2, ids)
    torch.testing.assert_close(apart, NTXentLoss(temperature=0.3)(z1, z2, ids))


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_a_file_is_mapped_and_never_written(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"features{suffix}"
    half = features().half()
    if suffix == ".npy":
        np.save(path, half.numpy())
    else:
        save_file({"features": half}, path)
    before = path.read_bytes()
    guide = Guide(path, margin=0.5, num_samples=N)
    assert guide.features is not None
    assert guide.features.dtype == torch.float16
    assert torch.equal(guide.features, half)
    z1, z2, ids = views()
    same = NTXentLoss(temperature=0.3, detector=Guide(half, margin=0.5))(z1, z2, ids)
    assert torch.equal(NTXentLoss(temperature=0.3, detector=guide)(z1, z2, ids), same)
    assert path.read_bytes() == before
    assert not guide.state_dict()


def test_a_copy_shares_the_features() -> None:
    guide = Guide(features(), alpha=0.1)
    twin = copy.deepcopy(guide)
    assert twin.features is not None
    assert guide.features is not None
    assert twin.features.data_ptr() == guide.features.data_ptr()
    assert repr(twin) == repr(guide) == f"Guide(<Tensor {tuple(guide.features.shape)}>, alpha=0.1)"


def test_the_candidates_own_modality_guides_without_a_file() -> None:
    images, texts, ids = views()
    loss_fn = CLIPLoss(
        temperature=0.3, learnable=False, detector=Guide(temperature=0.5), action="reweight"
    )
    i, t = F.normalize(images, dim=1), F.normalize(texts, dim=1)
    total = torch.zeros((), dtype=torch.float64)
    for anchors, others in ((i, t), (t, i)):
        degree = torch.exp(((others @ others.T).detach() - 1) / 0.5)
        weight = torch.where(torch.eye(B, dtype=torch.bool), 1.0, 1 - degree)
        logits = anchors @ others.T / 0.3
        total = total + (torch.log((weight * torch.exp(logits)).sum(1)) - logits.diag()).mean() / 2
    require_equal(loss_fn(images, texts, ids), total, images, texts)
    with pytest.raises(ValueError, match="the guide needs `features`"):
        NTXentLoss(temperature=0.3, detector=Guide(alpha=0.1))(images, texts, ids)


def test_degrees_of_one_are_what_hard_attraction_is() -> None:
    """Also where attracted kin leave the denominator."""
    z1, z2, ids = views()
    labels = torch.eye(3)[torch.arange(N) % 3]
    for make in (
        lambda **given: NTXentLoss(temperature=0.3, **given),
        lambda **given: SogCLRLoss(num_samples=N, temperature=0.3, **given),
    ):
        soft = make(detector=Guide(labels, temperature=1e-3), action="attract")(z1, z2, ids)
        hard = make(detector=Guide(labels, margin=0.5), action="attract")(z1, z2, ids)
        require_equal(soft, hard, z1, z2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "exactly one of `alpha` .*must be given"),
        ({"alpha": 0.1, "margin": 0.1}, "exactly one of"),
        ({"alpha": 1.0}, r"`alpha` \(=1.0\) must be in \(0, 1\)"),
        ({"margin": -0.1}, r"`margin` \(=-0.1\) must be in \[0, 2\]"),
        ({"temperature": 0.0}, r"`temperature` \(=0.0\) must be above 0"),
        (
            {"alpha": 0.1, "num_samples": 13},
            r"`features` \(=12 rows\) must hold one row for each of the 13 training samples",
        ),
    ],
)
def test_impossible_settings_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Guide(features(), **given)


def test_soft_kin_cannot_be_eliminated() -> None:
    with pytest.raises(
        ValueError, match=r"`action` \(='eliminate'\) must be 'attract' or 'reweight' with Guide"
    ):
        NTXentLoss(temperature=0.3, detector=Guide(features(), temperature=0.1))


def test_broken_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "features.npy"
    path.write_bytes(b"nothing")
    with pytest.raises(KinfolkError, match=r"is not a readable array"):
        Guide(path, alpha=0.1)
    with pytest.raises(KinfolkError, match="there is no file"):
        Guide(tmp_path / "none.npy", alpha=0.1)
    np.save(path, np.arange(12))
    with pytest.raises(ValueError, match=r"must be floats of the shape \(samples, features\)"):
        Guide(path, alpha=0.1)


class Counting(Guide):
    """Counts the rows of features that are read."""

    read = 0

    def _read(self, ids: Tensor, dtype: torch.dtype, of_candidates: bool = False) -> Tensor:
        self.read += len(ids)
        return super()._read(ids, dtype, of_candidates)


@pytest.mark.parametrize("block_rows", [None, 2])
def test_candidates_are_read_once_a_step(block_rows: int | None) -> None:
    guide, (z1, z2, ids) = Counting(features(), alpha=0.2), views()
    loss_fn = NTXentLoss(temperature=0.3, detector=guide, block_rows=block_rows)
    for steps in (1, 2):
        loss_fn(z1, z2, ids)
        assert guide.read == steps * (2 * B + B), "2B candidates, and the B samples of the anchors"


@pytest.mark.parametrize(
    ("value", "words"),
    [(float("nan"), "not all finite"), (float("inf"), "not all finite"), (0.0, "all 0")],
)
@pytest.mark.parametrize("in_file", [False, True])
def test_rows_without_a_direction_are_refused(
    tmp_path: Path, value: float, words: str, in_file: bool
) -> None:
    bad = features().half()
    bad[7], bad[9] = value, value
    if in_file:
        np.save(tmp_path / "bad.npy", bad.numpy())
    with pytest.raises(KinfolkError, match=rf"row 7 of .* {words} \(2 such rows of 12\)"):
        Guide(tmp_path / "bad.npy" if in_file else bad, alpha=0.1)


def test_an_array_is_taken_as_it_is() -> None:
    array = features().numpy().copy()
    array.flags.writeable = False
    z1, z2, ids = views()
    losses = [
        NTXentLoss(temperature=0.3, detector=Guide(given, alpha=0.2))(z1, z2, ids)
        for given in (features(), array)
    ]
    assert torch.equal(*losses)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            torch.ones(0, 3),
            r"`features` \(=torch.float32, shape \(0, 3\)\) must be floats .* at least one of each",
        ),
        (np.ones((3, 2), dtype=int), r"`features` \(=int64, shape \(3, 2\)\) must be floats"),
        (np.array([["a"]]), r"`features` \(=<U1, shape \(1, 1\)\) must be floats"),
        ([[1.0]], r"`features` \(=list\) must be a tensor, a NumPy array, or the path"),
    ],
)
def test_what_is_no_features_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Guide(given, alpha=0.1)


@pytest.mark.parametrize("given", [torch.ones(3, 2), np.ones((3, 2))])
def test_a_training_takes_features_in_memory_as_a_detector(given: Any) -> None:
    with pytest.raises(
        UsageError,
        match=r"`guide` \(=\w+\) must be a path or a name; .*`detector=kf.Guide\(features",
    ):
        kf.train("digits", method="simclr+guide", guide=given)


def test_a_training_goes_on_after_inference_mode() -> None:
    z1, z2, ids = views()
    loss_fn = NTXentLoss(temperature=0.3, detector=Guide(features(), alpha=0.2), block_rows=4)
    before = loss_fn(z1, z2, ids)
    other = ids.clone()
    other[0] = next(each for each in range(N) if each not in ids)
    with torch.inference_mode():
        changed = loss_fn(z1, z2, other.clone())
    torch.testing.assert_close(loss_fn(z1, z2, ids), before)
    torch.testing.assert_close(loss_fn(z1, z2, other), changed.clone())


def two_tables() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(8)
    anchors, noise = (torch.randn(N, 4, dtype=torch.float64, generator=g) for _ in range(2))
    return anchors * 3, anchors + noise


@pytest.mark.parametrize(("margin", "relative"), [(0.0, False), (0.3, False), (0.3, True)])
def test_two_tables_are_gistembed_in_both_directions(margin: float, relative: bool) -> None:
    """Negatives that the guide finds closer than the positive, less a margin, leave the sum."""
    one, other, ids = views()
    questions, answers = two_tables()
    guide = Guide(questions, positives=answers, margin=margin, relative=relative)
    loss_fn = CLIPLoss(temperature=0.3, learnable=False, detector=guide, block_rows=4)
    total, flagged = torch.zeros((), dtype=torch.float64), 0
    q, a = F.normalize(questions, dim=1)[ids], F.normalize(answers, dim=1)[ids]
    for anchors, others, own, candidates in ((one, other, q, a), (other, one, a, q)):
        logits = F.normalize(anchors, dim=1) @ F.normalize(others, dim=1).T / 0.3
        for i in range(B):
            sims = [float(own[i] @ candidates[j]) for j in range(B)]
            level = sims[i] - (margin * abs(sims[i]) if relative else margin)
            kept = [j for j in range(B) if j != i and sims[j] <= level]
            flagged += B - 1 - len(kept)
            kept = kept or [int(logits[i].masked_fill(torch.arange(B) == i, torch.inf).argmin())]
            total = total + (logits[i, [i, *kept]].logsumexp(0) - logits[i, i]) / (2 * B)
    require_equal(loss_fn(one, other, ids), total, one, other)
    assert 0 < flagged <= int(loss_fn.stats.flagged) + 2 * B


def test_equal_tables_are_one_table() -> None:
    z1, z2, ids = views()
    for given in ({"margin": 0.6}, {"alpha": 0.2}, {"margin": 0.6, "relative": True}):
        one, two = (
            CLIPLoss(temperature=0.3, detector=Guide(features(), positives=table, **given))  # type: ignore[arg-type]
            for table in (None, features())
        )
        torch.testing.assert_close(one(z1, z2, ids), two(z1, z2, ids))


@pytest.mark.parametrize("given", [{"alpha": 0.3}, {"margin": 0.8}])
def test_kin_have_degrees_by_their_cosine(given: Any) -> None:
    block = random_block(0, [3, 5, 0, 7], dtype=torch.float64)
    plain, graded = (Guide(features(), degrees=d, **given).find(block) for d in (False, True))
    assert plain.degree is not None
    assert graded.degree is not None
    unit = F.normalize(features(), dim=1)
    assert 0 < plain.degree.double().mean() < 1
    for row, i in enumerate(block.row_ids.tolist()):
        for column, j in enumerate(block.candidate_ids.tolist()):
            degree = float(1 + unit[i] @ unit[j]) / 2 if plain.degree[row, column] else 0.0
            assert float(graded.degree[row, column]) == pytest.approx(degree, abs=1e-12)


@pytest.mark.parametrize("own_weight", [None, 0.4])
def test_kin_are_attracted_by_their_degree(own_weight: float | None) -> None:
    z1, z2, ids = views()
    unit = F.normalize(features(), dim=1)[ids]
    sim = (unit @ unit.T).repeat(2, 2)
    degree = (1 + sim) / 2 * (sim > 1 - 0.8)
    assert ((degree > 0) & (degree < 0.99)).any()
    loss_fn = NTXentLoss(
        temperature=0.3,
        detector=Guide(features(), margin=0.8, degrees=True),
        action="attract",
        own_weight=own_weight,
        block_rows=4,
    )
    expected = weighted_attraction(z1, z2, 0.3, degree, own_weight)
    require_equal(loss_fn(z1, z2, ids), expected, z1, z2)


def test_a_degree_is_taken_from_the_weight_of_a_negative() -> None:
    z1, z2, ids = views()
    unit = F.normalize(features(), dim=1)[ids]
    sim = unit @ unit.T
    degree = (1 + sim) / 2 * (sim > 1 - 0.8)
    guide = Guide(features(), margin=0.8, degrees=True)
    loss_fn = NTXentLoss(temperature=0.3, detector=guide, action="reweight")
    z, losses = [v / v.norm() for v in [*z1, *z2]], []
    for i in range(2 * B):
        positive = torch.exp(z[i] @ z[(i + B) % (2 * B)] / 0.3)
        total = positive
        for j in range(2 * B):
            if j % B != i % B:
                total = total + (1 - degree[i % B, j % B]) * torch.exp(z[i] @ z[j] / 0.3)
        losses.append(torch.log(total) - torch.log(positive))
    require_equal(loss_fn(z1, z2, ids), torch.stack(losses).mean(), z1, z2)


def test_degrees_are_a_setting_of_a_training() -> None:
    for method in ("simclr+guide:attract", "clip+guide:reweight"):
        built = build_detector(parse(method), Context(N), {"degrees": True})
        assert isinstance(built, Guide)
        assert (built.alpha, built.degrees) == (0.1, True)
    assert "degrees" not in detector_arguments(parse("simclr+fnc"))
    with pytest.raises(ValueError, match=r"`degrees` \(=True\) needs `alpha` or `margin`"):
        Guide(features(), temperature=0.1, degrees=True)


def test_tables_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`positives` \(=\(11, 4\)\) must be as wide as"):
        Guide(features(), positives=features()[1:], margin=0.1)
    with pytest.raises(ValueError, match="`positives` must be given with `features`"):
        Guide(positives=features(), margin=0.1)
    with pytest.raises(ValueError, match=r"`relative` \(=True\) needs `margin`"):
        Guide(features(), alpha=0.1, relative=True)
