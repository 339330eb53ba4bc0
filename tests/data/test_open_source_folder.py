from __future__ import annotations

import os
from pathlib import Path

import pytest

from kinfolk.data.open_source import open_source
from kinfolk.data.prepare import prepare
from kinfolk.data.source import FileSource
from kinfolk.errors import KinfolkError, UsageError
from tests.data.images import noise, save


def opened(root: Path, labels: bool = False) -> FileSource:
    source = open_source(root, labels_from_folders=labels)
    assert isinstance(source, FileSource)
    return source


def keys(source: FileSource) -> list[str]:
    return [item.key for item in source.items()]


def test_recursive_and_sorted_by_relative_path(tmp_path: Path) -> None:
    for name in ("b.png", "a/z.PNG", "a/b/c.jpeg", "B.webp", "a.png"):
        save(tmp_path / name, noise(4, 4))
    assert keys(opened(tmp_path)) == ["B.webp", "a.png", "a/b/c.jpeg", "a/z.PNG", "b.png"]
    assert {item.split for item in opened(tmp_path).items()} == {"train"}
    assert {item.label for item in opened(tmp_path).items()} == {None}


def test_what_is_clearly_no_image_is_ignored(tmp_path: Path) -> None:
    save(tmp_path / "a.png", noise(4, 4))
    for name in (
        "notes.txt",
        "labels.csv",
        "x.json",
        ".DS_Store",
        "Thumbs.db",
        ".hidden.png",
        "README",
        "__MACOSX/b.png",
        ".git/c.png",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"no image")
    source = opened(tmp_path)
    assert keys(source) == ["a.png"]
    assert source.refused == []


def test_image_extensions_that_fail_are_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path / "a.png", noise(4, 4))
    (tmp_path / "b.png").write_bytes(b"")
    (tmp_path / "c.heic").write_bytes(b"some phone's format")
    (tmp_path / "d.jpg").symlink_to(tmp_path / "gone.jpg")
    os.mkfifo(tmp_path / "e.png")
    data = prepare(opened(tmp_path), image_size=4)
    assert data.samples.keys == ["a.png"]
    assert dict(data.quarantine) == {
        "b.png": "the file is empty (0 bytes)",
        "c.heic": "not an image in a known format",
        "d.jpg": "not a readable file",
        "e.png": "not a readable file",
    }


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    save(tmp_path / "pool" / "a.png", noise(4, 4))
    root = tmp_path / "root"
    save(root / "x" / "b.png", noise(4, 4))
    (root / "x" / "loop").symlink_to(root)
    (root / "self").symlink_to(root / "self")
    (root / "pool").symlink_to(tmp_path / "pool")
    (root / "file.png").symlink_to(tmp_path / "pool" / "a.png")
    assert keys(opened(root)) == ["file.png", "pool/a.png", "x/b.png"]


def test_links_between_two_folders_are_followed_once(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        save(tmp_path / name / f"{name}.png", noise(4, 4))
        (tmp_path / name / "link").symlink_to(tmp_path / other)
    assert keys(opened(tmp_path)) == ["a/a.png", "a/link/b.png", "b/b.png", "b/link/a.png"]


@pytest.mark.parametrize(
    ("name", "split"), [("test", "test"), ("val", "val"), ("valid", "val"), ("validation", "val")]
)
def test_folders_named_like_splits_are_splits(tmp_path: Path, name: str, split: str) -> None:
    for path in (f"{name}/cats/c.png", "train/dogs/a.png", "train/cats/b.png", "train/loose.png"):
        save(tmp_path / path, noise(4, 4))
    source = opened(tmp_path, labels=True)
    assert source.classes == ["cats", "dogs"]
    data = prepare(source, image_size=4)
    assert data.samples.keys == [
        "train/cats/b.png",
        "train/dogs/a.png",
        "train/loose.png",
        f"{name}/cats/c.png",
    ]
    assert data.samples.splits == ["train", "train", "train", split]
    assert data.num_train == 3
    assert data.labels is not None
    assert data.labels.tolist() == [0, 1, -1, 0]
    assert data.samples.of(split).ids.tolist() == [3]


def test_what_lies_outside_the_splits_is_refused_not_trained_on(tmp_path: Path) -> None:
    for path in ("train/a.png", "test/b.png", "extra/c.png", "d.png"):
        save(tmp_path / path, noise(4, 4))
    data = prepare(opened(tmp_path), image_size=4)
    assert data.samples.keys == ["train/a.png", "test/b.png"]
    reason = "outside the split folders test/, train/"
    assert data.quarantine == [("d.png", reason), ("extra/c.png", reason)]


def test_train_alone_is_a_split_and_next_to_others_a_class(tmp_path: Path) -> None:
    save(tmp_path / "train" / "cats" / "a.png", noise(4, 4))
    assert opened(tmp_path, labels=True).classes == ["cats"]
    save(tmp_path / "bus" / "a.png", noise(4, 4))
    assert opened(tmp_path, labels=True).classes == ["bus", "train"]


def test_no_classes_unless_asked(tmp_path: Path) -> None:
    save(tmp_path / "cats" / "a.png", noise(4, 4))
    data = prepare(opened(tmp_path), image_size=4)
    assert data.labels is None
    assert data.classes is None


def test_labels_from_folders_without_folders(tmp_path: Path) -> None:
    save(tmp_path / "a.png", noise(4, 4))
    with pytest.raises(UsageError, match="all images are at its top level"):
        opened(tmp_path, labels=True)


def test_hostile_file_names_stay_keys(tmp_path: Path) -> None:
    names = [
        "<script>alert(1)</script>.png",
        "new\nline.png",
        'quo"te,comma.png',
        "日本語 🐈.png",
        "\u202ertl.png",
        "=1+1.png",
        "a" * 200 + ".png",
    ]
    for name in names:
        target = tmp_path / name
        if "/" in name:
            target.parent.mkdir(parents=True, exist_ok=True)
        save(target, noise(4, 4))
    raw = os.path.join(os.fsencode(tmp_path), b"caf\xe9.png")
    with open(raw, "wb") as file:
        file.write((tmp_path / names[3]).read_bytes())
    data = prepare(opened(tmp_path), image_size=4)
    assert data.samples.keys == sorted([*names, "caf\\xe9.png"])
    data.samples.to_parquet(tmp_path / "samples.parquet")


def test_two_names_that_are_one_as_text(tmp_path: Path) -> None:
    save(tmp_path / "caf\\xe9.png", noise(4, 4))
    with open(os.path.join(os.fsencode(tmp_path), b"caf\xe9.png"), "wb") as file:
        file.write((tmp_path / "caf\\xe9.png").read_bytes())
    with pytest.raises(KinfolkError, match="rename one"):
        prepare(opened(tmp_path), image_size=4)


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KinfolkError, match="contains no images"):
        opened(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(KinfolkError, match="contains no images, only 1 other file"):
        opened(tmp_path)


def test_a_folder_without_a_good_image_is_refused(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(
        KinfolkError,
        match=r"all 2 images of .* were refused; the first is a.png: the file is empty",
    ):
        prepare(opened(tmp_path), image_size=4)


def test_labels_from_folders_belongs_to_folders(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("image\na.png\n")
    for spec in ("digits", tmp_path / "t.csv", [1, 2]):
        with pytest.raises(UsageError, match="`labels_from_folders` needs a folder of images"):
            open_source(spec, labels_from_folders=True)
    with pytest.raises(UsageError, match="no file or folder"):
        open_source(tmp_path / "gone", labels_from_folders=True)


def test_names_of_splits_in_any_case(tmp_path: Path) -> None:
    for name in ("Training/cat/a.png", "TEST/cat/b.png", "Validation/dog/c.png"):
        save(tmp_path / name, noise(4, 4))
    items = {item.key: (item.split, item.label) for item in opened(tmp_path, labels=True).items()}
    assert items == {
        "Training/cat/a.png": ("train", 0),
        "TEST/cat/b.png": ("test", 0),
        "Validation/dog/c.png": ("val", 1),
    }


def test_folders_that_look_like_classes_are_mentioned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kinfolk.data")
    for name in ("cat/a.png", "dog/b.png"):
        save(tmp_path / name, noise(4, 4))
    opened(tmp_path, labels=True)
    assert not caplog.messages
    opened(tmp_path)
    assert (
        "has 2 folders (cat, dog); if they are classes, --labels-from-folders makes them labels"
        in caplog.text
    )
    caplog.clear()
    save(tmp_path / "c.png", noise(4, 4))
    opened(tmp_path)
    assert not caplog.messages
