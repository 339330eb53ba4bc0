"""Labels and texts from files: joined by key where there are keys, in any order."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kinfolk.auditing.inputs import TEXT_COLUMNS, align, read_column
from kinfolk.errors import KinfolkError, KinfolkWarning, UsageError

KEYS = [f"photos/{i:03}.png" for i in range(20)]
LABELS = [f"class {i % 3}" for i in range(20)]


def shuffled_csv(path: Path, column: str = "file", keys: list[str] = KEYS) -> Path:
    rows = list(zip(keys, LABELS, strict=True))
    random.Random(0).shuffle(rows)
    path.write_text(f"{column},label\n" + "".join(f"{key},{label}\n" for key, label in rows))
    return path


@pytest.mark.parametrize("column", ["key", "file", "filename", "path"])
def test_a_reordered_label_file_is_joined_by_key(tmp_path: Path, column: str) -> None:
    found = read_column(shuffled_csv(tmp_path / "y.csv", column))
    assert found.values != LABELS
    assert align(found, KEYS, 20) == LABELS


def test_file_names_match_keys_with_folders(tmp_path: Path) -> None:
    bare = [key.rpartition("/")[2] for key in KEYS]
    assert align(read_column(shuffled_csv(tmp_path / "y.csv", keys=bare)), KEYS, 20) == LABELS
    absolute = [f"/data/{key}" for key in KEYS]
    assert align(read_column(shuffled_csv(tmp_path / "y.csv", keys=absolute)), KEYS, 20) == LABELS


def test_the_column_id_orders_rows_without_keys(tmp_path: Path) -> None:
    order = list(range(20))
    random.Random(1).shuffle(order)
    pq.write_table(
        pa.table({"id": order, "label": [LABELS[i] for i in order]}), tmp_path / "y.parquet"
    )
    assert align(read_column(tmp_path / "y.parquet"), None, 20) == LABELS
    assert align(read_column(tmp_path / "y.parquet"), KEYS, 20) == LABELS


def test_missing_and_unknown_samples_are_reported(tmp_path: Path) -> None:
    found = read_column(shuffled_csv(tmp_path / "y.csv"))
    with pytest.warns(
        KinfolkWarning,
        match=r"no entry for 1 of 16 samples \(the first is other.png\) and names 5 samples",
    ):
        assert align(found, [*KEYS[:15], "other.png"], 16) == [*LABELS[:15], None]


def test_keys_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    found = read_column(shuffled_csv(tmp_path / "y.csv"))
    with pytest.raises(UsageError, match=r"none of the 20 samples .* the features have a.png"):
        align(found, ["a.png", "b.png"], 2)
    with pytest.raises(
        UsageError, match=r"names its samples in the column `file`, but the features have no keys"
    ):
        align(found, None, 20)
    (tmp_path / "twice.csv").write_text("key,label\na,0\nb,1\na,1\n")
    with pytest.raises(UsageError, match=r"`key` of .* names a more than once"):
        read_column(tmp_path / "twice.csv")
    (tmp_path / "short.csv").write_text("key,label\na,0\nb\n")
    with pytest.raises(KinfolkError, match=r"row 2 of .* has 1 cells, its header has 2"):
        read_column(tmp_path / "short.csv")


def test_texts_have_their_columns(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('file,caption\nb.png,"two, words"\na.png,one\n')
    assert align(
        read_column(tmp_path / "t.csv", "--texts", TEXT_COLUMNS), ["a.png", "b.png"], 2
    ) == ["one", "two, words"]
    (tmp_path / "t.txt").write_text("first line\nsecond line")
    assert align(
        read_column(tmp_path / "t.txt", "--texts", TEXT_COLUMNS), ["a.png", "b.png"], 2
    ) == [
        "first line",
        "second line",
    ]
