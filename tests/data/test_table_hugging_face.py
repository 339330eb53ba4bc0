"""Folders of Hugging Face, written by the package `datasets` and read again."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from kinfolk.data.open_source import open_source
from kinfolk.data.prepare import prepare
from kinfolk.errors import KinfolkError, UsageError

CLASSES = ["cat", "dog", "owl"]


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The package, with a cache for this test."""
    package = pytest.importorskip("datasets")
    monkeypatch.setattr(package.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    return package


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((6, 6, 3), value, dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def made(
    package: Any, values: list[int], image: str = "image", label: str = "label", **more: list[Any]
) -> Any:
    columns: dict[str, list[Any]] = {
        image: [{"bytes": png(value), "path": None} for value in values]
    }
    columns |= {label: [value % 3 for value in values], **more}
    known = {image: package.Image(), label: package.ClassLabel(names=CLASSES)}
    known |= {
        name: package.List(package.Value("string"))
        if isinstance(column[0], list)
        else package.Value("string")
        for name, column in more.items()
    }
    return package.Dataset.from_dict(columns, features=package.Features(known))


def first_pixels(source: Any) -> list[int]:
    data = prepare(source, image_size=6)
    return [int(x) for x in data.pixels(torch.arange(len(data)))[:, 0, 0, 0]]


@pytest.mark.parametrize("below", ["", "data", "plain_text"])
def test_parquet_files_have_splits_labels_and_class_names(
    tmp_path: Path, datasets: Any, below: str
) -> None:
    folder = tmp_path / "made" / below
    folder.mkdir(parents=True)
    made(datasets, [50, 51]).to_parquet(folder / "test-00000-of-00001.parquet")
    made(datasets, [10, 11, 12]).to_parquet(folder / "train-00000-of-00002.parquet")
    made(datasets, [13, 14]).to_parquet(folder / "train-00001-of-00002.parquet")
    source = open_source(tmp_path / "made")
    assert source.classes == CLASSES
    data = prepare(source, image_size=6)
    assert data.num_train == 5
    assert list(data.samples.keys) == [*(f"train/{row}" for row in range(5)), "test/0", "test/1"]
    assert data.labels is not None
    assert data.labels.tolist() == [1, 2, 0, 1, 2, 2, 0]
    assert first_pixels(source) == [10, 11, 12, 13, 14, 50, 51]


def test_save_to_disk_is_read_with_its_splits(tmp_path: Path, datasets: Any) -> None:
    both = {"train": made(datasets, [5, 6, 7]), "test": made(datasets, [9])}
    datasets.DatasetDict(both).save_to_disk(tmp_path / "both")
    source = open_source(tmp_path / "both")
    assert [item.split for item in source.items()] == ["train", "train", "train", "test"]
    assert source.classes == CLASSES
    assert first_pixels(source) == [5, 6, 7, 9]
    assert first_pixels(open_source(tmp_path / "both" / "test")) == [9]


def test_the_only_image_column_and_fine_labels_are_used(tmp_path: Path, datasets: Any) -> None:
    made(datasets, [20, 21], image="img", label="fine_label").to_parquet(tmp_path / "train.parquet")
    source = open_source(tmp_path)
    assert [item.label for item in source.items()] == [2, 0]
    assert first_pixels(source) == [20, 21]


def test_one_file_with_bytes_captions_groups_and_splits(tmp_path: Path, datasets: Any) -> None:
    columns = {
        "image": [png(1), png(2), png(3)],
        "caption": ["one", "", "three"],
        "group": ["a", None, "a"],
        "split": ["train", "train", "validation"],
    }
    pq.write_table(pa.table(columns), tmp_path / "all.parquet")
    source = open_source(tmp_path / "all.parquet")
    assert [(i.key, i.caption, i.group, i.split) for i in source.items()] == [
        ("train/0", "one", "a", "train"),
        ("train/2", "three", "a", "val"),
    ]
    assert source.refused == [("train/1", "the caption is empty")]
    assert first_pixels(source) == [1, 3]


def test_rows_without_bytes_are_refused_by_name(tmp_path: Path, datasets: Any) -> None:
    (tmp_path / "a.png").write_bytes(png(77))
    rows = [
        {"bytes": png(5), "path": None},
        {"bytes": None, "path": str(tmp_path / "a.png")},
        {"bytes": b"no image", "path": "bad.png"},
        None,
    ]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pq.write_table(pa.table({"image": pa.array(rows, kind)}), tmp_path / "t.parquet")
    data = prepare(open_source(tmp_path / "t.parquet"), image_size=6)
    assert len(data) == 1
    no_bytes = "the row has no bytes of an image; save the data set with its images embedded"
    assert data.quarantine == [
        ("train/1", no_bytes),
        ("train/2", "not an image in a known format"),
        ("train/3", no_bytes),
    ]


def test_a_folder_of_images_with_a_table_stays_a_folder_of_images(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(3))
    pq.write_table(pa.table({"image": ["a.png"], "label": [1]}), tmp_path / "metadata.parquet")
    assert [item.key for item in open_source(tmp_path).items()] == ["a.png"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"image_column": "photo"},
            "has no column 'photo' of images; its columns are 'image', 'label'",
        ),
        ({"label_column": "kind"}, "has no column 'kind' for `label_column`"),
        ({"caption_column": "text"}, "has no column 'text' for `caption_column`"),
        ({"labels_from_folders": True}, "`labels_from_folders` needs a folder of images, not"),
    ],
)
def test_refuses_columns_that_are_not_there(
    tmp_path: Path, datasets: Any, options: dict[str, Any], message: str
) -> None:
    made(datasets, [1]).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(UsageError, match=re.escape(message)):
        open_source(tmp_path, **options)


def test_refuses_several_columns_of_labels(tmp_path: Path, datasets: Any) -> None:
    both = made(datasets, [0], label="breed")
    both = both.add_column("colour", [0]).cast_column("colour", datasets.ClassLabel(names=["a"]))
    both.to_parquet(tmp_path / "train.parquet")
    with pytest.raises(UsageError, match=r"columns of labels \('breed', 'colour'\); choose one"):
        open_source(tmp_path)
    assert open_source(tmp_path, label_column="colour").classes == ["a"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_refuses_a_damaged_file(tmp_path: Path, datasets: Any) -> None:
    made(datasets, [1]).to_parquet(tmp_path / "train-00000-of-00002.parquet")
    (tmp_path / "train-00001-of-00002.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(KinfolkError, match=r"not a readable data set of `datasets`: .*[Pp]arquet"):
        open_source(tmp_path)


def test_without_the_package_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    pq.write_table(pa.table({"image": [png(1)]}), tmp_path / "t.parquet")
    with pytest.raises(UsageError, match=r"needs the package datasets; .*`pip install datasets`"):
        open_source(tmp_path / "t.parquet")
