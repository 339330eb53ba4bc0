from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from kinfolk.data.images import ImageData
from kinfolk.data.open_source import open_source
from kinfolk.data.prepare import prepare
from kinfolk.errors import KinfolkError, UsageError
from tests.data.images import noise, save


def write_csv(path: Path, rows: list[tuple[Any, ...]], **options: Any) -> Path:
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, **options).writerows(rows)
    return path


def image_files(root: Path, count: int) -> list[str]:
    return [
        save(root / "images" / f"{n}.png", noise(8, 8, n)).relative_to(root).as_posix()
        for n in range(count)
    ]


def prepared(path: Path, **options: Any) -> ImageData:
    return prepare(open_source(path, **options), image_size=8)


def labels_of(data: ImageData) -> list[int] | None:
    return None if data.labels is None else data.labels.tolist()


def test_every_column_of_a_table_is_used(tmp_path: Path) -> None:
    a, b, c = image_files(tmp_path, 3)
    header = ("image", "caption", "label", "group", "split")
    rows = [
        (a, "a dog, running", "dog", "g1", "test"),
        (b, "two\nlines “quoted”", "cat", "g2", "train"),
        (c, "x", "dog", "g1", "dev"),
    ]
    data = prepared(write_csv(tmp_path / "t.csv", [header, *rows]))
    assert data.samples.keys == [b, c, a]
    assert data.samples.splits == ["train", "val", "test"]
    assert data.classes == ["cat", "dog"]
    assert labels_of(data) == [0, 1, 1]
    assert data.samples.captions == ["two\nlines “quoted”", "x", "a dog, running"]
    assert data.samples.groups == ["g2", "g1", "g1"]
    assert torch.equal(data.pixels(torch.tensor([2]))[0], torch.from_numpy(noise(8, 8, 0)))


def test_csv_tsv_and_parquet_agree(tmp_path: Path) -> None:
    names = image_files(tmp_path, 3)
    columns = {"image": names, "label": ["x", "y", "x"], "caption": ["1", "2", "3"]}
    rows = [tuple(columns), *zip(*columns.values(), strict=True)]
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    (tmp_path / "bom.csv").write_bytes(
        b"\xef\xbb\xbf" + write_csv(tmp_path / "t.csv", rows).read_bytes()
    )
    write_csv(tmp_path / "t.tsv", rows, delimiter="\t")
    first, *others = (
        prepared(tmp_path / name) for name in ("t.parquet", "t.csv", "t.tsv", "bom.csv")
    )
    for other in others:
        assert first.samples.first_difference(other.samples) is None
        assert torch.equal(first.pixels(torch.arange(3)), other.pixels(torch.arange(3)))


@pytest.mark.parametrize(
    "labels", [[3, 0, None], [3.0, 0.0, float("nan")], ["3", "0", ""], [3, 0, -1]]
)
def test_labels_of_whole_numbers_stay(tmp_path: Path, labels: list[Any]) -> None:
    pq.write_table(
        pa.table({"image": image_files(tmp_path, 3), "label": labels}), tmp_path / "t.parquet"
    )
    data = prepared(tmp_path / "t.parquet")
    assert labels_of(data) == [3, 0, -1]
    assert data.classes is None


def test_missing_images_are_refused_by_name(tmp_path: Path) -> None:
    (a,) = image_files(tmp_path, 1)
    (tmp_path / "broken.png").write_bytes(b"")
    rows = [
        ("image",),
        ("gone.png",),
        (a,),
        ("broken.png",),
        ("images",),
        ("https://example.org/a.png",),
    ]
    data = prepared(write_csv(tmp_path / "t.csv", rows))
    assert data.samples.keys == [a]
    assert dict(data.quarantine) == {
        "gone.png": "there is no such file",
        "broken.png": "the file is empty (0 bytes)",
        "images": "there is no such file",
        "https://example.org/a.png": "there is no such file",
    }


def test_empty_cells_and_zero_bytes_in_paths(tmp_path: Path) -> None:
    (a,) = image_files(tmp_path, 1)
    pq.write_table(pa.table({"image": [a, None, "", "a\0b.png"]}), tmp_path / "t.parquet")
    data = prepared(tmp_path / "t.parquet")
    assert data.samples.keys == [a]
    assert [reason for _, reason in data.quarantine] == [
        "the image column is empty",
        "the image column is empty",
        "there is no such file",
    ]
    assert len({path for path, _ in data.quarantine}) == 3


def test_absolute_paths_are_read(tmp_path: Path) -> None:
    (a,) = image_files(tmp_path, 1)
    (tmp_path / "elsewhere").mkdir()
    path = write_csv(
        tmp_path / "elsewhere" / "t.csv", [("image",), (str(tmp_path / a),), ("../" + a,)]
    )
    assert len(prepared(path)) == 2


def test_rows_that_share_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = image_files(tmp_path, 2)
    (tmp_path / "bad.png").write_bytes(b"x")
    rows = [
        ("image", "caption"),
        (a, "1"),
        ("bad.png", "2"),
        (b, "3"),
        (a, "4"),
        ("bad.png", "5"),
        (a, "6"),
    ]
    data = prepared(write_csv(tmp_path / "t.csv", rows))
    assert data.samples.keys == [a, b, f"{a}#2", f"{a}#3"]
    assert data.samples.captions == ["1", "3", "4", "6"]
    assert data.samples.groups == [a, b, a, a]
    assert [path for path, _ in data.quarantine] == ["bad.png", "bad.png#2"]
    pixels = data.pixels(torch.arange(4))
    assert torch.equal(pixels[0], torch.from_numpy(noise(8, 8, 0)))
    assert torch.equal(pixels[1], torch.from_numpy(noise(8, 8, 1)))
    assert torch.equal(pixels[2], pixels[0])
    assert torch.equal(pixels[3], pixels[0])
    assert data.aspect(torch.arange(4)).tolist() == [1.0] * 4


def test_an_image_of_several_splits_is_a_sample_of_each(tmp_path: Path) -> None:
    a, b = image_files(tmp_path, 2)
    data = prepared(
        write_csv(tmp_path / "t.csv", [("image", "split"), (a, "test"), (b, "train"), (a, "train")])
    )
    assert data.samples.keys == [b, f"{a}#2", a]
    assert torch.equal(data.pixels(torch.tensor([2])), data.pixels(torch.tensor([1])))
    assert torch.equal(data.pixels(torch.tensor([0]))[0], torch.from_numpy(noise(8, 8, 1)))


def test_a_key_that_is_taken(tmp_path: Path) -> None:
    (a,) = image_files(tmp_path, 1)
    (tmp_path / f"{a}#2").write_bytes((tmp_path / a).read_bytes())
    with pytest.raises(KinfolkError, match="two samples with the key"):
        prepared(write_csv(tmp_path / "t.csv", [("image",), (a,), (a,), (f"{a}#2",)]))


def test_columns_are_found_by_option(tmp_path: Path) -> None:
    (a,) = image_files(tmp_path, 1)
    path = write_csv(tmp_path / "t.csv", [("file", "class", "label"), (a, "dog", "7")])
    assert labels_of(prepared(path, image_column="file")) == [7]
    assert prepared(path, image_column="file", label_column="class").classes == ["dog"]
    with pytest.raises(
        UsageError,
        match="no column 'image' for `image_column`; its columns are 'file', 'class', 'label'",
    ):
        prepared(path)
    with pytest.raises(UsageError, match="no column 'kind' for `label_column`"):
        prepared(path, image_column="file", label_column="kind")


def test_a_caption_that_is_not_utf8(tmp_path: Path) -> None:
    a, b = image_files(tmp_path, 2)
    (tmp_path / "t.csv").write_bytes(f"image,caption\n{a},good\n{b},".encode() + b"caf\xe9\n")
    data = prepared(tmp_path / "t.csv")
    assert data.samples.keys == [a]
    assert data.quarantine == [(b, "the caption is not valid UTF-8")]


def test_bad_captions_are_refused_by_name_and_shift_nothing(tmp_path: Path) -> None:
    a, b, c, d, e = image_files(tmp_path, 5)
    rows = [(a, "one"), (b, ""), ("gone.png", "lost"), (c, "x" * 10_000), (d, " \t"), (e, "five")]
    data = prepared(write_csv(tmp_path / "t.csv", [("image", "caption"), *rows]))
    assert list(zip(data.samples.keys, data.samples.captions or [], strict=True)) == [
        (a, "one"),
        (e, "five"),
    ]
    assert data.quarantine == [
        (b, "the caption is empty"),
        ("gone.png", "there is no such file"),
        (c, "the caption has 10,000 characters; it must have fewer than 10,000"),
        (d, "the caption is empty"),
    ]
    assert torch.equal(data.pixels(torch.tensor([1]))[0], torch.from_numpy(noise(8, 8, 4)))


def test_a_column_of_lists_gives_a_sample_several_captions(tmp_path: Path) -> None:
    a, b, c = image_files(tmp_path, 3)
    table = pa.table({"image": [a, b, c], "caption": [["one", "", "two"], [None], ["three"]]})
    pq.write_table(table, tmp_path / "t.parquet")
    data = prepared(tmp_path / "t.parquet")
    assert data.samples.keys == [a, c]
    assert data.samples.captions == [("one", "two"), ("three",)]
    assert data.quarantine == [
        (f"{a}[2]", "the caption is empty"),
        (f"{b}[1]", "the caption is empty"),
        (b, "it has no caption"),
    ]
    data.samples.to_parquet(tmp_path / "samples.parquet")
    again = type(data.samples).read(tmp_path / "samples.parquet")
    assert data.samples.first_difference(again) is None
    assert again.of("train").captions == data.samples.captions


def test_a_parquet_caption_that_is_not_utf8(tmp_path: Path) -> None:
    a, b = image_files(tmp_path, 2)
    captions = pa.array([b"good", b"caf\xe9"], pa.binary())
    pq.write_table(pa.table({"image": [a, b], "caption": captions}), tmp_path / "t.parquet")
    data = prepared(tmp_path / "t.parquet")
    assert (data.samples.captions, data.quarantine) == (
        ["good"],
        [(b, "the caption is not valid UTF-8")],
    )


def test_known_positives_are_groups_of_samples(tmp_path: Path) -> None:
    a, b, c, d, e = image_files(tmp_path, 5)
    (tmp_path / "copy.png").write_bytes((tmp_path / a).read_bytes())
    rows = [
        (a, "x", ""),
        (b, "caf\u00e9  here", ""),
        (c, "cafe\u0301 here", "g"),
        (d, "y", "g"),
        ("copy.png", "z", ""),
        (e, "w", ""),
    ]
    data = prepared(write_csv(tmp_path / "t.csv", [("image", "caption", "group"), *rows]))
    assert data.groups is not None
    assert data.groups.tolist() == [0, 1, 1, 1, 0, 5]
    data.samples.to_parquet(tmp_path / "samples.parquet")
    assert pq.read_table(tmp_path / "samples.parquet")["group_id"].to_pylist() == [0, 1, 1, 1, 0, 5]
    again = type(data.samples).read(tmp_path / "samples.parquet")
    assert again.group_ids is not None
    assert again.group_ids.tolist() == [0, 1, 1, 1, 0, 5]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is empty; its first line must name the columns"),
        (b"image,label\n", "has no rows"),
        (b"image,label\na.png\n", "row 1 of .* has 1 cells, its header has 2"),
        (b"image,image\na.png,b.png\n", "names a column twice"),
        (
            b'image,caption\na.png,"open\nb.png,x\n',
            "unexpected end of data, in row 1",
        ),
        (b'image,caption\na.png,x\nb.png,"two" dogs\n', "in row 2; quotes"),
        (b"image;caption\na.png;x\n", "its columns are 'image;caption'; choose one by"),
        (
            b"image\ngone.png\nalso.png\n",
            "all 2 images of .* were refused; the first is gone.png: there is no such file",
        ),
    ],
)
def test_a_csv_file_that_is_no_table_is_refused_in_one_sentence(
    tmp_path: Path, content: bytes, match: str
) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(KinfolkError, match=match):
        prepared(tmp_path / "t.csv")


def test_a_tab_separated_line_is_a_row_whatever_its_quotes(tmp_path: Path) -> None:
    a, b, c, d = image_files(tmp_path, 4)
    lines = [
        "image\tcaption",
        f'{a}\t"an open one',
        f'{b}\tthe "end"',
        f'{c}\t"a ""quoted"" tab:\t."',
        f'{d}\t"two" dogs',
    ]
    (tmp_path / "t.tsv").write_text("\r\n".join(lines) + "\r\n", encoding="utf-8", newline="")
    data = prepared(tmp_path / "t.tsv")
    assert data.samples.keys == [a, b, c, d]
    assert data.samples.captions == [
        '"an open one',
        'the "end"',
        'a "quoted" tab:\t.',
        '"two" dogs',
    ]


def test_a_caption_of_any_length_costs_its_own_row_alone(tmp_path: Path) -> None:
    a, b = image_files(tmp_path, 2)
    before = csv.field_size_limit()
    data = prepared(
        write_csv(tmp_path / "t.csv", [("image", "caption"), (a, "x" * 200_000), (b, "short")])
    )
    assert data.samples.keys == [b]
    assert data.quarantine == [
        (a, "the caption has 200,000 characters; it must have fewer than 10,000")
    ]
    assert csv.field_size_limit() == before


def test_a_parquet_file_without_paths_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(KinfolkError, match="not a readable table"):
        prepared(tmp_path / "t.parquet")
    pq.write_table(pa.table({"image": [1, 2]}), tmp_path / "t.parquet")
    with pytest.raises(KinfolkError, match="holds int; it must hold file paths, or"):
        prepared(tmp_path / "t.parquet")
