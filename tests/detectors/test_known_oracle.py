"""The oracle: equal known labels, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kinfolk.detectors import Oracle
from kinfolk.errors import UsageError
from kinfolk.objectives import NTXentLoss
from tests.detectors.blocks import kin, random_block


def test_kin_are_candidates_of_the_same_known_label() -> None:
    labels = [0, 1, -1, 0, -1, 1]
    block = random_block(0, [5, 0, 2, 4, 3])
    found = kin(Oracle(torch.tensor(labels)), block)
    for r, i in enumerate(block.row_ids.tolist()):
        for c, j in enumerate(block.candidate_ids.tolist()):
            assert found[r, c].item() == (i != j and labels[i] >= 0 and labels[i] == labels[j])


def test_any_negative_label_is_unknown() -> None:
    assert not kin(Oracle(torch.tensor([-1, -7, -7])), random_block(0, [0, 1, 2])).any()


def test_labels_are_data_not_state() -> None:
    assert not Oracle(torch.tensor([0, 1])).state_dict()


@pytest.mark.parametrize(
    "labels",
    [
        torch.rand(3),
        torch.zeros(3, 1, dtype=torch.int64),
        torch.ones(3, dtype=torch.bool),
        torch.zeros(0, dtype=torch.int64),
    ],
)
def test_labels_must_be_integers_of_one_dimension(labels: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="`labels`"):
        Oracle(labels)


def test_an_id_without_a_label_is_named() -> None:
    with pytest.raises(ValueError, match=r"`ids` \(=2\) must be in \[0, 2\)"):
        NTXentLoss(detector=Oracle(torch.tensor([0, 1])))(
            torch.eye(2), torch.eye(2), torch.tensor([0, 2])
        )


def test_labels_of_a_file_stand_in_for_those_of_the_data(tmp_path: Path) -> None:
    tracks = tmp_path / "tracks.npy"
    np.save(tracks, np.array([7, 7, 3], dtype=np.int32))
    block = random_block(0, [0, 1, 2])
    expected = kin(Oracle(torch.tensor([7, 7, 3])), block)
    assert expected.any()
    assert torch.equal(kin(Oracle(torch.tensor([0, 1, 2]), labels_file=tracks), block), expected)
    assert torch.equal(kin(Oracle(labels_file=str(tracks)), block), expected)
    with pytest.raises(UsageError, match="an integer for each of the 4 training samples"):
        Oracle(torch.zeros(4, dtype=torch.int64), labels_file=tracks)
    with pytest.raises(UsageError, match="No such file"):
        Oracle(labels_file=tmp_path / "gone.npy")
    np.save(tracks, np.array([{}], dtype=object))
    with pytest.raises(UsageError, match=r"must be a \.npy file"):
        Oracle(labels_file=tracks)
    with pytest.raises(UsageError, match="needs labels"):
        Oracle()
