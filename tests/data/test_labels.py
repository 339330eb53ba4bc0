"""Names of splits, and groups of samples that share an image, a caption or a group."""

from __future__ import annotations

import numpy as np
import pytest

from kinfolk.data.labels import SPLITS, VALIDATION_SPLITS, group_ids, split_name
from kinfolk.data.open_source import open_source


def slow_groups(digests: list[str], captions: list[str], groups: list[str | None]) -> list[int]:
    """Labels spread over the graph of the three relations until nothing changes."""
    number = len(digests)
    labels = list(range(number))
    changed = True
    while changed:
        changed = False
        for i in range(number):
            for j in range(number):
                kin = (
                    digests[i] == digests[j]
                    or captions[i].split() == captions[j].split()
                    or (groups[i] and groups[i] == groups[j])
                )
                if kin and labels[j] < labels[i]:
                    labels[i], changed = labels[j], True
    return labels


@pytest.mark.parametrize("seed", range(5))
def test_equals_labels_spread_over_the_graph(seed: int) -> None:
    random = np.random.default_rng(seed)
    digests = [str(n) for n in random.integers(0, 30, 40)]
    captions = [f"a {'  ' if n % 2 else ''}{n // 2}" for n in random.integers(0, 60, 40)]
    groups = [None if n > 8 else str(n) for n in random.integers(0, 40, 40)]
    assert group_ids(digests, captions, groups).tolist() == slow_groups(digests, captions, groups)


def test_samples_with_nothing_in_common_are_alone() -> None:
    assert group_ids(["a", "b", "c"], ["x", "y", None], ["", None, ""]).tolist() == [0, 1, 2]


def test_captions_that_differ_in_case_or_spaces_are_the_same() -> None:
    assert group_ids(["a", "b", "c"], ["A Dog", "a  dog ", "a dogs"], None).tolist() == [0, 0, 2]


def test_several_captions_join_all_who_share_one() -> None:
    assert group_ids(
        ["a", "b", "c", "d"], [("x", "y"), ("z",), ("y", "z"), ("w",)], None
    ).tolist() == [0, 0, 0, 3]


@pytest.mark.parametrize(
    ("given", "split"),
    [
        ("train", "train"),
        ("training", "train"),
        ("", "train"),
        ("val", "val"),
        ("Valid", "val"),
        ("validation", "val"),
        ("dev", "val"),
    ],
)
def test_a_mapping_of_data_sets_is_named_as_folders_and_tables_are(given: str, split: str) -> None:
    assert split_name(given) == split
    images = [(np.zeros((4, 4, 3), dtype=np.uint8), 0)] * 2
    assert [item.split for item in open_source({given: images}).items()] == [split] * 2


def test_every_name_of_a_validation_split_is_one_and_none_is_the_test() -> None:
    assert {SPLITS[name] for name in VALIDATION_SPLITS} == {"val"}
    assert "test" not in VALIDATION_SPLITS
