from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kinfolk.data.sample_table import Samples
from kinfolk.errors import KinfolkError


def samples(**changes: Any) -> Samples:
    base = Samples(
        ids=np.arange(4),
        keys=["a.png", "b\n.png", "<c>.png", "d.png"],
        widths=np.array([3, 4, 5, 6]),
        heights=np.array([7, 8, 9, 10]),
        labels=np.array([1, -1, 0, 1]),
        classes=["cat", "dog"],
        splits=["train", "train", "val", "test"],
        sizes_bytes=np.array([3112, 200, 300, 400]),
        modified_ns=np.array([1, 2, 3, 4]),
        digests=["00", "01", "02", "03"],
        captions=["x", None, "", "y"],
        groups=["g", "g", None, "h"],
    )
    return replace(base, **changes)


def taken(rows: list[int]) -> Samples:
    """The rows as a scan of only these files would give them: with new ids."""
    return replace(samples()._take(rows), ids=np.arange(len(rows)))


def rows(table: Samples) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pa.table(table._columns()).to_pylist()
    return found


def test_of_a_split_keeps_ids() -> None:
    test = samples().of("test")
    assert (test.ids.tolist(), test.keys, test.captions) == ([3], ["d.png"], ["y"])
    assert len(samples().of("none")) == 0


@pytest.mark.parametrize(
    "changes", [{}, {"labels": None, "classes": None, "captions": None, "groups": None}]
)
def test_a_table_of_samples_is_read_as_it_was_written(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    before = samples(**changes)
    before.to_parquet(tmp_path / "samples.parquet")
    after = Samples.read(tmp_path / "samples.parquet")
    assert rows(after) == rows(before)
    assert after.classes == before.classes
    assert (after.labels is None) == (before.labels is None)
    assert before.first_difference(after) is None


def test_the_parquet_file_has_documented_columns(tmp_path: Path) -> None:
    samples().to_parquet(tmp_path / "samples.parquet")
    table = pq.read_table(tmp_path / "samples.parquet")
    assert table.column_names[:6] == ["id", "key", "width", "height", "label", "split"]
    assert table["label"].to_pylist() == [1, None, 0, 1]


def test_not_a_table_of_samples(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"no")
    for path in (tmp_path / "a", tmp_path / "missing"):
        with pytest.raises(
            KinfolkError, match=r"not a readable table of samples|there is no table of samples"
        ):
            Samples.read(path)


DIFFERENCES: list[tuple[Samples, str | None]] = [
    (samples(), None),
    (samples(modified_ns=np.array([9, 9, 9, 9])), None),
    (
        samples(sizes_bytes=np.array([3200, 200, 300, 400])),
        "the size in bytes of sample 0 (a.png) was 3112, is now 3200",
    ),
    (
        samples(digests=["00", "xx", "02", "03"]),
        "the digest of sample 1 (b\\n.png) was '01', is now 'xx'",
    ),
    (samples(labels=np.array([1, -1, 1, 1])), "the label of sample 2 (<c>.png) was 0, is now 1"),
    (samples(labels=None), "the label of sample 0 (a.png) was 1, is now none"),
    (
        samples(splits=["train", "train", "test", "test"]),
        "the split of sample 2 (<c>.png) was 'val', is now 'test'",
    ),
    (samples(captions=["x", None, "", "z"]), "the caption of sample 3 (d.png) was 'y', is now 'z'"),
    (samples(groups=None), "the group of sample 0 (a.png) was 'g', is now none"),
    (samples(widths=np.array([3, 4, 5, 9])), "the width of sample 3 (d.png) was 6, is now 9"),
    (
        samples(classes=["cat", "cow"]),
        "the classes were ['cat', 'dog'], are now ['cat', 'cow']",
    ),
    (taken([0, 2, 3]), "sample 1 (of 4) was b\\n.png, is now <c>.png (of 3)"),
    (taken([0, 1, 2]), "sample 3 (of 4) was d.png, is now missing (of 3)"),
    (taken([0, 2, 1, 3]), "sample 1 (of 4) was b\\n.png, is now <c>.png (of 4)"),
    (
        samples(keys=["a.png", "new.png", "<c>.png", "d.png"]),
        "sample 1 (of 4) was b\\n.png, is now new.png (of 4)",
    ),
    (taken([0, 1, 2, 3, 3]), "sample 4 (of 4) was missing, is now d.png (of 5)"),
]


def test_the_first_difference_of_two_tables_is_named() -> None:
    for now, sentence in DIFFERENCES:
        assert samples().first_difference(now) == sentence


def test_an_added_sample_is_named() -> None:
    assert (
        taken([0, 2, 3]).first_difference(samples())
        == "sample 1 (of 3) was <c>.png, is now b\\n.png (of 4)"
    )
    assert (
        taken([0, 1, 2]).first_difference(samples())
        == "sample 3 (of 3) was missing, is now d.png (of 4)"
    )


def test_the_first_of_several_is_named() -> None:
    now = samples(digests=["00", "01", "02", "xx"], sizes_bytes=np.array([3112, 200, 301, 400]))
    assert (
        samples().first_difference(now)
        == "the size in bytes of sample 2 (<c>.png) was 300, is now 301"
    )


@pytest.mark.parametrize(
    "changes", [{}, {"labels": None, "classes": None, "captions": None, "groups": None}]
)
def test_packed_and_mapped_tables_are_the_same(tmp_path: Path, changes: dict[str, Any]) -> None:
    before = samples(**changes)
    for after in (
        before.map_from_file(tmp_path),
        Samples.open(next(tmp_path.glob("*.arrow"))),
    ):
        assert rows(after) == rows(before)
        assert after.classes == before.classes
        assert before.first_difference(after) is None
        assert after.first_difference(before) is None
        assert after.num_train == 2
        assert rows(after.of("test")) == rows(before.of("test"))
    before.map_from_file(tmp_path)
    assert len(list(tmp_path.glob("*.arrow"))) == 1, "the file is named by its content"
    replace(before, classes=["cat", "other"]).map_from_file(tmp_path)
    assert len(list(tmp_path.glob("*.arrow"))) == 2


def many(number: int) -> Samples:
    return Samples(
        ids=np.arange(number),
        keys=[
            f"train/n{row // 1000:08d}/n{row // 1000:08d}_{row % 1000:05d}.JPEG"
            for row in range(number)
        ],
        widths=np.full(number, 500),
        heights=np.full(number, 375),
        labels=np.arange(number) // 1000,
        classes=None,
        splits=["train"] * number,
        sizes_bytes=np.full(number, 110_000),
        modified_ns=np.full(number, 1_700_000_000_000_000_000),
        digests=[f"{row:016x}" for row in range(number)],
    )


def test_at_most_100_bytes_a_sample_and_none_of_them_private(tmp_path: Path) -> None:
    mapped = many(3000).map_from_file(tmp_path)
    assert mapped.file is not None
    assert mapped.file.stat().st_size / 3000 < 100
    assert not mapped.widths.flags.owndata
    table = pa.ipc.open_file(pa.memory_map(str(mapped.file))).read_all()
    assert table.nbytes / 3000 < 100
    allocated = pa.total_allocated_bytes()
    again = Samples.open(mapped.file)
    assert pa.total_allocated_bytes() - allocated < 10_000
    assert again.keys[2999].endswith("_00999.JPEG")


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    file = many(100).map_from_file(tmp_path).file
    assert file is not None
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(KinfolkError, match=r"samples-.*arrow` is not a readable table"):
        Samples.open(file)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        KinfolkError, match=r"samples-.*\.arrow cannot be written: its folder is not a folder"
    ):
        many(10).map_from_file(tmp_path / "file")
