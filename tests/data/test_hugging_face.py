"""Folders of Hugging Face `datasets`, written here as the package writes them: Parquet shards and
`save_to_disk`."""

from __future__ import annotations

import io
import json
import re
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

FEATURES = {
    "image": {"_type": "Image"},
    "label": {"names": ["cat", "dog", "owl"], "_type": "ClassLabel"},
}


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((6, 6, 3), value, dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def table(
    values: list[int],
    *,
    image: str = "image",
    features: dict[str, Any] | None = None,
    names: bool = True,
    **more: Any,
) -> pa.Table:
    images = pa.array(
        [{"bytes": png(value), "path": f"{value}.png" if names else None} for value in values]
    )
    columns = {image: images, "label": pa.array([value % 3 for value in values]), **more}
    known = FEATURES if features is None else features
    return pa.table(columns).replace_schema_metadata(
        {b"huggingface": json.dumps({"info": {"features": known}}).encode()}
    )


def write(path: Path, made: pa.Table, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(made, path, **options)


def first_pixels(source: Any) -> list[int]:
    data = prepare(source, image_size=6)
    return [int(x) for x in data.pixels(torch.arange(len(data)))[:, 0, 0, 0]]


@pytest.mark.parametrize("below", ["", "data", "plain_text"])
def test_shards_splits_labels_and_class_names(tmp_path: Path, below: str) -> None:
    write(tmp_path / below / "test-00000-of-00001.parquet", table([50, 51]))
    write(
        tmp_path / below / "train-00000-of-00002.parquet",
        table([10, 11, 12], names=True),
        row_group_size=2,
    )
    write(tmp_path / below / "train-00001-of-00002-9f86d081884c7d65.parquet", table([13, 14]))
    (tmp_path / "README.md").write_text("a card")
    source = open_source(tmp_path)
    assert source.classes == ["cat", "dog", "owl"]
    data = prepare(source, image_size=6)
    assert data.num_train == 5
    assert list(data.samples.keys) == [f"train/{v}.png" for v in (10, 11, 12, 13, 14)] + [
        "test/50.png",
        "test/51.png",
    ]
    assert data.labels is not None
    assert data.labels.tolist() == [1, 2, 0, 1, 2, 2, 0]
    assert first_pixels(source) == [10, 11, 12, 13, 14, 50, 51]


def test_the_only_column_of_images_and_rows_without_names(tmp_path: Path) -> None:
    features = {
        "fine_label": {"names": ["a", "b", "c"], "_type": "ClassLabel"},
        "coarse": {"names": ["x"], "_type": "ClassLabel"},
    }
    made = table([20, 21], image="img", features=features, names=False)
    write(
        tmp_path / "train.parquet",
        made.rename_columns(["img", "fine_label"]).replace_schema_metadata(made.schema.metadata),
    )
    source = open_source(tmp_path)
    assert source.classes == ["a", "b", "c"]
    assert [item.key for item in source.items()] == ["train/0", "train/1"]
    assert [item.label for item in source.items()] == [2, 0]
    assert first_pixels(source) == [20, 21]


def test_a_single_file_plain_bytes_captions_and_splits(tmp_path: Path) -> None:
    columns = {
        "image": [png(1), png(2), png(3)],
        "caption": ["one", "", "three"],
        "split": ["train", "train", "validation"],
    }
    pq.write_table(pa.table(columns), tmp_path / "all.parquet")
    source = open_source(tmp_path / "all.parquet")
    assert [(item.key, item.caption, item.split) for item in source.items()] == [
        ("train/0", "one", "train"),
        ("val/0", "three", "val"),
    ]
    assert [key for key, _ in source.refused] == ["train/1"]
    assert first_pixels(source) == [1, 3]


def test_what_save_to_disk_writes(tmp_path: Path) -> None:
    for split, values in (("train", [[5, 6], [7]]), ("test", [[9]])):
        folder = tmp_path / split
        folder.mkdir()
        names = [f"data-{number:05d}-of-{len(values):05d}.arrow" for number in range(len(values))]
        for name, part in zip(names, values, strict=True):
            made = table(part)
            with (
                pa.OSFile(str(folder / name), "wb") as sink,
                pa.ipc.new_stream(sink, made.schema) as writer,
            ):
                writer.write_table(made)
        (folder / "state.json").write_text(
            json.dumps({"_data_files": [{"filename": name} for name in names], "_split": split})
        )
        (folder / "dataset_info.json").write_text("{}")
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    source = open_source(tmp_path)
    assert [item.split for item in source.items()] == ["train", "train", "train", "test"]
    assert source.classes == ["cat", "dog", "owl"]
    assert first_pixels(source) == [5, 6, 7, 9]
    assert first_pixels(open_source(tmp_path / "test")) == [9]
    (tmp_path / "train" / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "../../secret.arrow"}]})
    )
    with pytest.raises(KinfolkError, match="does not list the data files beside it"):
        open_source(tmp_path)


def test_bytes_may_lie_in_a_file_and_bad_rows_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(77))
    rows = [
        {"bytes": None, "path": "a.png"},
        {"bytes": None, "path": "gone.png"},
        {"bytes": b"no image", "path": "bad.png"},
        None,
    ]
    pq.write_table(
        pa.table(
            {"image": pa.array(rows, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))}
        ),
        tmp_path / "t.parquet",
    )
    data = prepare(open_source(tmp_path / "t.parquet"), image_size=6)
    assert int(data.pixels(torch.tensor([0]))[0, 0, 0, 0]) == 77
    reasons = dict(data.quarantine)
    assert list(reasons) == ["train/1", "train/2", "train/3"]
    assert "its file can't be read" in reasons["train/1"]
    assert reasons["train/2"] == "not an image in a known format"
    assert reasons["train/3"] == "the image column is empty"


@pytest.mark.parametrize("how", ["absolute", "upwards", "link"])
def test_files_outside_of_the_folder_are_not_read(tmp_path: Path, how: str) -> None:
    (tmp_path / "secret.png").write_bytes(png(77))
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    name = {
        "absolute": str(tmp_path / "secret.png"),
        "upwards": "../secret.png",
        "link": "link.png",
    }[how]
    rows = [{"bytes": None, "path": name}, {"bytes": png(5), "path": "b.png"}]
    pq.write_table(
        pa.table(
            {"image": pa.array(rows, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))}
        ),
        folder / "t.parquet",
    )
    data = prepare(open_source(folder / "t.parquet"), image_size=6)
    assert len(data) == 1
    ((_, reason),) = data.quarantine
    assert (
        reason
        == f"it holds no bytes, and the file it names ({name}) is outside of {folder}; copy the"
        " file into that folder"
    )


def test_a_folder_of_images_with_a_table_stays_a_folder_of_images(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(3))
    pq.write_table(pa.table({"image": ["a.png"], "label": [1]}), tmp_path / "metadata.parquet")
    assert [item.key for item in open_source(tmp_path).items()] == ["a.png"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"image_column": "photo"},
            UsageError,
            "has no column 'photo' of images for `image_column`; its columns are 'image', 'label'",
        ),
        ({"label_column": "kind"}, UsageError, "has no column 'kind' for `label_column`"),
        ({"caption_column": "text"}, UsageError, "has no column 'text' for `caption_column`"),
        (
            {"labels_from_folders": True},
            UsageError,
            "holds tables of images, whose labels are a column",
        ),
    ],
)
def test_refuses_columns_that_are_not_there(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    write(tmp_path / "train-00000-of-00001.parquet", table([1]))
    with pytest.raises(error, match=re.escape(message)):
        open_source(tmp_path, **options)


def test_refuses_what_is_ambiguous_or_damaged(tmp_path: Path) -> None:
    for name in ("mnist", "fashion_mnist"):
        write(tmp_path / "two" / name / "train-00000-of-00001.parquet", table([1]))
    with pytest.raises(
        UsageError, match=r"several data sets \(fashion_mnist/, mnist/\); give the folder of one"
    ):
        open_source(tmp_path / "two")
    features = {name: {"names": ["a"], "_type": "ClassLabel"} for name in ("breed", "colour")}
    made = table([0], features=features, breed=[0], colour=[0]).drop_columns(["label"])
    write(tmp_path / "labels" / "train.parquet", made)
    with pytest.raises(
        UsageError,
        match=r"several columns of labels \('breed', 'colour'\); choose one by `label_column`",
    ):
        open_source(tmp_path / "labels")
    assert open_source(tmp_path / "labels", label_column="breed").classes == ["a"]
    write(tmp_path / "cut" / "train-00000-of-00002.parquet", table([1]))
    (tmp_path / "cut" / "train-00001-of-00002.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(
        KinfolkError, match=r"train-00001-of-00002\.parquet` is not a readable table"
    ):
        open_source(tmp_path / "cut")
    write(tmp_path / "cut" / "train-00001-of-00002.parquet", table([1]).drop_columns(["label"]))
    with pytest.raises(KinfolkError, match="has no column 'label', which"):
        open_source(tmp_path / "cut")
