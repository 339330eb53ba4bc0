"""Known kin: the listed pairs, among whatever candidates there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kinfolk as kf
from kinfolk.detectors import Known
from kinfolk.errors import KinfolkError, KinfolkWarning, UsageError
from kinfolk.pairs import OUT, Block
from tests.detectors.blocks import kin, random_block

PAIRS = [(0, 2), (2, 5), (5, 2), (4, 4), (1, 3), (0, 2)]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("num_views", [1, 2])
def test_kin_are_the_listed_pairs(symmetric: bool, num_views: int) -> None:
    block = random_block(0, [5, 0, 2, 4, 1], num_views)
    found = kin(Known(num_samples=6, pairs=torch.tensor(PAIRS), symmetric=symmetric), block)
    for r, i in enumerate(block.row_ids.tolist()):
        for c, j in enumerate(block.candidate_ids.tolist()):
            assert found[r, c].item() == (
                i != j and ((i, j) in PAIRS or (symmetric and (j, i) in PAIRS))
            ), (i, j)


def test_candidates_of_a_queue_may_repeat_a_sample_and_are_each_found_once() -> None:
    candidates = torch.tensor([2, 3, 2, 0, 1])
    block = Block(torch.zeros(1, 5), torch.tensor([0]), candidates, 1, torch.tensor([4]))
    assert kin(Known(num_samples=6, pairs=torch.tensor(PAIRS)), block).nonzero().tolist() == [
        [0, 0],
        [0, 2],
    ]


def test_what_shares_the_anchors_group_is_never_kin() -> None:
    block = Block(
        torch.tensor([[OUT, 0.1]]), torch.tensor([0]), torch.tensor([2, 3]), 1, torch.tensor([1])
    )
    assert not kin(Known(num_samples=6, pairs=torch.tensor(PAIRS)), block).any()


def test_no_pairs_flag_nothing() -> None:
    torch.manual_seed(0)
    z1, z2, ids = torch.randn(6, 4), torch.randn(6, 4), torch.arange(6)
    detector = Known(num_samples=6, pairs=torch.zeros(0, 2, dtype=torch.int64))
    assert torch.equal(
        kf.NTXentLoss(temperature=0.1, detector=detector)(z1, z2, ids),
        kf.NTXentLoss(temperature=0.1)(z1, z2, ids),
    )


def test_pairs_of_equal_labels_are_the_oracle() -> None:
    torch.manual_seed(0)
    labels = torch.tensor([0, 1, 0, 2, 1, 0])
    pairs = (labels.unsqueeze(1) == labels).nonzero()
    z1, z2, ids = torch.randn(6, 4), torch.randn(6, 4), torch.arange(6)
    known = kf.NTXentLoss(
        temperature=0.1, detector=Known(num_samples=6, pairs=pairs), action="attract"
    )(z1, z2, ids)
    assert torch.allclose(
        known,
        kf.NTXentLoss(temperature=0.1, detector=kf.Oracle(labels), action="attract")(z1, z2, ids),
    )


def test_pairs_are_data_not_state() -> None:
    assert not Known(num_samples=6, pairs=torch.tensor(PAIRS)).state_dict()


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_pairs_from_a_file(tmp_path: Path, suffix: str) -> None:
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    table = pa.table(
        {
            "kin": [i for _, i in PAIRS],
            "similarity": [0.5] * len(PAIRS),
            "anchor": [i for i, _ in PAIRS],
        }
    )
    path = tmp_path / f"pairs.{suffix}"
    (pa.csv.write_csv if suffix == "csv" else pa.parquet.write_table)(table, path)
    block = random_block(0, [5, 0, 2, 4, 1])
    assert torch.equal(
        kin(Known(num_samples=6, pairs=str(path)), block),
        kin(Known(num_samples=6, pairs=torch.tensor(PAIRS)), block),
    )


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sample id 7\) must be in \[0, 6\)"):
        Known(num_samples=6, pairs=torch.tensor([[0, 7]]))
    with pytest.raises(ValueError, match=r"sample id -1\)"):
        Known(num_samples=6, pairs=torch.tensor([[0, -1]]))
    with pytest.raises(ValueError, match=r"shape \(pairs, 2\)"):
        Known(num_samples=6, pairs=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"`ids` \(=6\) must be in \[0, 6\)"):
        kf.NTXentLoss(detector=Known(num_samples=6, pairs=torch.tensor(PAIRS)))(
            torch.eye(2), torch.eye(2), torch.tensor([0, 6])
        )
    with pytest.raises(UsageError, match="there is no file"):
        Known(num_samples=6, pairs=str(tmp_path / "none.parquet"))
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"nothing")
    with pytest.raises(KinfolkError, match="not a readable table"):
        Known(num_samples=6, pairs=str(broken))
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(KinfolkError, match="columns `anchor` and `kin`"):
        Known(num_samples=6, pairs=str(other))


def test_pairs_are_matched_by_key(tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text(
        "anchor,kin,anchor_key,kin_key\n0,1,a,b\n1,2,b,c\n2,0,c,z\n"
    )
    with pytest.warns(
        KinfolkWarning, match=r"1 of 3 pairs in .* name samples that are not in the training"
    ):
        detector = Known(num_samples=3, pairs=str(tmp_path / "pairs.csv"), keys=["c", "b", "a"])
    assert sorted(zip(detector.start_N.diff().tolist(), "cba", strict=True)) == [
        (1, "a"),
        (1, "c"),
        (2, "b"),
    ]
    with pytest.raises(
        UsageError, match=r"none of the 3 pairs in .* it names a, they are named like x"
    ):
        Known(num_samples=2, pairs=str(tmp_path / "pairs.csv"), keys=["x", "y"])
