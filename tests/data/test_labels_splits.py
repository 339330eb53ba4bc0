"""One definition of split names for data sources, training and evaluation."""

from __future__ import annotations

import numpy as np
import pytest

from kinfolk import embedding as parts
from kinfolk.data.labels import SPLITS, TEST_SPLITS, VALIDATION_SPLITS, split_name
from kinfolk.data.open_source import open_source
from kinfolk.evaluation import retrieval as paired
from kinfolk.training import epoch_end as knn


@pytest.mark.parametrize(
    ("given", "split"),
    [("train", "train"), ("training", "train"), ("", "train"), ("val", "val"), ("Valid", "val"), ("validation", "val"), ("dev", "val")],
)
def test_a_mapping_of_data_sets_is_named_as_folders_and_tables_are(given: str, split: str) -> None:
    assert split_name(given) == split
    images = [(np.zeros((4, 4, 3), dtype=np.uint8), 0)] * 2
    assert [item.split for item in open_source({given: images}).items()] == [split] * 2


def test_training_and_evaluation_share_the_names() -> None:
    assert parts.TEST_SPLITS is paired.TEST_SPLITS is knn.TEST_SPLITS is TEST_SPLITS  # type: ignore[attr-defined]
    assert "test" not in VALIDATION_SPLITS
    assert {SPLITS[name] for name in VALIDATION_SPLITS} == {"val"}
