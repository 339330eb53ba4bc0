from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kinfolk.data.open_source import open_source
from kinfolk.data.prepare import prepare
from kinfolk.errors import KinfolkError, UsageError


def test_digits_are_bundled_and_split_by_class() -> None:
    data = prepare(open_source("digits"), image_size=32)
    assert (len(data), data.num_train, data.height, data.width) == (1797, 1442, 8, 8)
    assert data.classes == [str(digit) for digit in range(10)]
    assert data.labels is not None
    share = torch.bincount(data.labels[data.num_train :]) / torch.bincount(data.labels)
    assert ((share > 0.18) & (share < 0.22)).all()
    pixels = data.pixels(torch.arange(len(data)))
    assert (int(pixels.min()), int(pixels.max())) == (0, 255)
    assert (
        data.samples.first_difference(prepare(open_source("digits"), image_size=32).samples) is None
    )


def python2_pickle(content: dict[bytes, Any], module: bytes = b"numpy.core.multiarray") -> bytes:
    """Protocol 2, as Python 2 wrote the official archives: byte strings, and arrays from
    `numpy.core.multiarray`."""
    data = pickle.dumps(content, protocol=2)
    return data.replace(b"numpy._core.multiarray", module)


def cifar(folder: Path, classes: int) -> tuple[Any, list[int]]:
    """A small archive in the official form; returns images and labels, training first."""
    rng = np.random.default_rng(0)
    names = (
        [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]
        if classes == 10
        else ["train", "test"]
    )
    folder.mkdir(parents=True)
    images, labels = [], []
    for name in names:
        data = rng.integers(0, 256, (4, 3072), dtype=np.uint8)
        label = rng.integers(0, classes, 4).tolist()
        key = b"labels" if classes == 10 else b"fine_labels"
        (folder / name).write_bytes(
            python2_pickle(
                {b"data": data, key: label, b"coarse_labels": [0] * 4, b"filenames": [b"a.png"] * 4}
            )
        )
        images.append(data.reshape(4, 3, 32, 32).transpose(0, 2, 3, 1))
        labels += label
    meta = {
        b"label_names" if classes == 10 else b"fine_label_names": [
            f"class {n}".encode() for n in range(classes)
        ]
    }
    (folder / ("batches.meta" if classes == 10 else "meta")).write_bytes(python2_pickle(meta))
    return np.concatenate(images), labels


def pack(folder: Path, target: Path) -> Path:
    with tarfile.open(target, "w:gz") as archive:
        archive.add(folder, folder.name)
    return target


@pytest.mark.parametrize(
    ("name", "classes"), [("cifar-10-batches-py", 10), ("cifar-100-python", 100)]
)
def test_cifar_archive_folder_and_folder_above(tmp_path: Path, name: str, classes: int) -> None:
    images, labels = cifar(tmp_path / "x" / name, classes)
    for path in (
        tmp_path / "x" / name,
        tmp_path / "x",
        pack(tmp_path / "x" / name, tmp_path / "a.tar.gz"),
    ):
        data = prepare(open_source(path), image_size=32)
        assert np.array_equal(data.pixels(torch.arange(len(data))).numpy(), images)
        assert data.labels is not None
        assert data.labels.tolist() == labels
        assert data.num_train == len(labels) - 4
        assert data.classes == [f"class {n}" for n in range(classes)]


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


class Evaluated:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (eval, (f"open({str(self.mark)!r}, 'w').close()",))


@pytest.mark.parametrize("bomb", [Bomb, Evaluated])
@pytest.mark.parametrize("packed", [False, True])
def test_a_pickle_that_would_run_code_is_refused_without_running(
    tmp_path: Path, bomb: Any, packed: bool
) -> None:
    folder, mark = tmp_path / "cifar-10-batches-py", tmp_path / "ran"
    cifar(folder, 10)
    (folder / "data_batch_3").write_bytes(pickle.dumps({b"data": bomb(mark)}, protocol=2))
    with pytest.raises(KinfolkError, match=r"asks to run .*; it is refused"):
        open_source(pack(folder, tmp_path / "a.tar.gz") if packed else folder)
    assert not mark.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        python2_pickle({b"labels": [0] * 4}),
        python2_pickle({b"data": np.zeros((4, 10), np.uint8), b"labels": [0] * 4}),
        python2_pickle({b"data": np.zeros((4, 3072), np.float32), b"labels": [0] * 4}),
        python2_pickle({b"data": [1, 2], b"labels": [0] * 4}),
        python2_pickle({b"data": np.zeros((4, 3072), np.uint8), b"labels": [0] * 3}),
        python2_pickle({b"data": np.zeros((4, 3072), np.uint8), b"labels": [99] * 4}),
        pickle.dumps([1, 2, 3], protocol=2),
    ],
)
def test_broken_batches_are_refused(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    cifar(folder, 10)
    (folder / "test_batch").write_bytes(content)
    with pytest.raises(KinfolkError):
        open_source(folder)


def test_archives_that_are_something_else(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(b"not a tar")
    with pytest.raises(KinfolkError, match=r"not a readable archive: [^\\]*; download it again"):
        open_source(tmp_path / "a.tar.gz")
    with tarfile.open(tmp_path / "b.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("x"), io.BytesIO())
    with pytest.raises(KinfolkError, match="an official CIFAR archive"):
        open_source(tmp_path / "b.tar.gz")
    images = tmp_path / "cifar-10-batches-py"
    cifar(images, 10)
    whole = pack(images, tmp_path / "c.tar.gz").read_bytes()
    (tmp_path / "c.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(KinfolkError, match="is not a readable archive"):
        open_source(tmp_path / "c.tar.gz")


@pytest.mark.parametrize("spec", ["cifar10", "cifar100", "no/such/place"])
def test_a_missing_path_is_refused(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"no file or folder `{spec}`"):
        open_source(spec)


def test_an_unknown_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.xyz").write_bytes(b"")
    with pytest.raises(UsageError, match=r"must be a folder of images, .npz"):
        open_source(tmp_path / "a.xyz")


def test_paths_that_do_not_exist_and_files_that_are_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(
        UsageError, match=r"there is no file or folder `.*photo`; did you mean `.*photos`\?"
    ):
        open_source(tmp_path / "photo")
    with pytest.raises(UsageError, match=r"there is no file or folder `.*gone"):
        open_source(tmp_path / "gone" / "photos")
    with pytest.raises(
        UsageError, match="there is no file or folder `mnist`; data sets are not downloaded"
    ):
        open_source("mnist")
    for name, message in (
        ("a.zip", "unpack other archives"),
        ("a.JPG", "must be a folder of images"),
    ):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(UsageError, match=message):
            open_source(tmp_path / name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(KinfolkError, match=r"photos` contains no images"):
        open_source("~/photos")
