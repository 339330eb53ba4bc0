"""Files that somebody else wrote: damaged, lying about their size, or made to harm. Readers must
refuse them in a sentence or read them."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.faults.inject import mutated

if TYPE_CHECKING:
    from tests.faults.campaign import Tally

Reader = Callable[[Path], object]


def hostile_files(number: int, chance: random.Random, room: Path, tally: Tally) -> None:
    """The made ones, each once, and so many mutations of good ones."""
    room = room / "hostile"
    room.mkdir(exist_ok=True)
    for name, data, read in made():
        tally.add("hostile files", *_held(room / name, data, read))
    good = seeds(room)
    for _ in range(number):
        name, data, read = chance.choice(good)
        tally.add("hostile files", *_held(room / f"mutated-{name}", mutated(data, chance), read))


def _held(path: Path, data: bytes, read: Reader) -> tuple[bool, str]:
    """Whether the reader gives something or refuses in one printable line; anything else is a fault
    of ours."""
    from kinfolk.errors import KinfolkError

    path.write_bytes(data)
    ran = path.parent / "ran"
    try:
        read(path)
    except KinfolkError as error:
        message = str(error)
        fine = message.isprintable() and 10 < len(message) <= 4000
        return fine and not ran.exists(), f"{path.name}: {message[:300]!r}"
    except Exception as error:
        return False, f"{path.name}: {type(error).__name__}: {str(error)[:200]}"
    return not ran.exists(), f"{path.name} ran its code"


def made() -> list[tuple[str, bytes, Reader]]:
    """(name, content, reader) of files that are made to harm."""
    bomb = "a0: &a0 [x, x]\n" + "".join(
        f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)
    )
    deep = b"[" * 5_000
    evil = pickle.dumps(_Evil())
    header = json.dumps(
        {"features": {"dtype": "F32", "shape": [1 << 40, 8], "data_offsets": [0, 32]}}
    ).encode()
    overlapping = json.dumps(
        {n: {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]} for n in ("features", "x")}
    ).encode()
    beyond = json.dumps(
        {"features": {"dtype": "F32", "shape": [2, 4], "data_offsets": [1 << 40, (1 << 40) + 32]}}
    ).encode()
    nested = b'{"features":' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"}"
    asks = json.dumps(
        {
            "format": 1,
            "encoder": {"name": "timm/hf-hub:somebody/model", "pretrained": True},
            "meta": {},
        }
    )
    wide = json.dumps(
        {
            "format": 1,
            "encoder": {
                "name": "resnet10",
                "stem": "cifar",
                "width": 1 << 30,
                "zero_init_residual": False,
            },
        }
    )
    return [
        ("bomb.yaml", bomb.encode(), _yaml),
        ("circle.yaml", b"a: &a [*a]\nepochs: *a\n", _yaml),
        ("deep.yaml", deep, _yaml),
        ("binary.yaml", bytes(range(256)), _yaml),
        ("code.yaml", b"epochs: !!python/object/apply:os.mkdir [ran]\n", _yaml),
        ("nan.yaml", b"method: simclr+glofnd\ndetector: {alpha: .nan}\n", _yaml),
        ("large.yaml", b"a: " + b"x" * (2 << 20), _yaml),
        ("lying.npz", _npz((1 << 40, 8)), _features),
        ("negative.npz", _npz((-4, 8)), _features),
        ("lying-compressed.npz", _npz((1 << 40, 8), zipfile.ZIP_DEFLATED), _features),
        ("lying-images.npz", _npz((1 << 40, 8), name="images"), _images),
        ("lying-labels.npz", _npz((1 << 40,), name="labels"), _labels),
        ("lying.npy", _npy((1 << 40, 8)), _features),
        ("lying-labels.npy", _npy((1 << 50,)), _labels),
        ("objects.npy", _objects(), _features),
        ("objects-labels.npy", _objects(), _labels),
        ("objects.npz", _zipped({"images.npy": _objects()}), _images),
        ("lying.safetensors", _safetensors(header), _features),
        ("overlapping.safetensors", _safetensors(overlapping), _features),
        ("beyond.safetensors", _safetensors(beyond), _features),
        ("deep.safetensors", _safetensors(nested), _features),
        ("long.safetensors", struct.pack("<Q", 1 << 62) + b"{}", _features),
        ("evil.pt", evil, _state),
        ("evil-zip.pt", _zipped({"archive/data.pkl": evil, "archive/version": b"3"}), _state),
        ("evil.ckpt", _zipped({"archive/data.pkl": evil, "archive/version": b"3"}), _checkpoint),
        ("evil.safetensors", evil, _state),
        ("asks.safetensors", _described(asks), _encoder),
        ("wide.safetensors", _described(wide), _encoder),
        ("deep-description.safetensors", _described("[" * 50_000), _encoder),
        ("names.csv", b'image,label\n"=cmd()\r\x1b[2J",\x00\n', _source),
        ("quotes.csv", b'image,label\n"a' + b'"' * 999, _source),
        ("wide.csv", b"image," + b",".join(b"c%d" % n for n in range(5000)) + b"\n", _source),
        ("links.tar", _tar(), _source),
        ("tokenizer.json", deep, _tokenizer),
        ("binary.csv", bytes(range(256)), _source),
        ("excluded.csv", bytes(range(256)), _excluded),
        ("quarantine.csv", b'path,reason\n"a', _quarantine),
    ]


def seeds(room: Path) -> list[tuple[str, bytes, Reader]]:
    """(name, good content, reader), to be mutated."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from PIL import Image
    from safetensors.torch import save

    from kinfolk.models import build_encoder
    from kinfolk.models.weights import save_encoder
    from kinfolk.training.config import TrainConfig

    numbers = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
    files: dict[str, bytes] = {}
    kinds: dict[str, Callable[[Any], object]] = {
        "a.npy": lambda file: np.save(file, numbers),
        "a.npz": lambda file: np.savez(file, features=numbers),
        "c.npz": lambda file: np.savez_compressed(file, features=numbers),
    }
    for name, write in kinds.items():
        file = io.BytesIO()
        write(file)
        files[name] = file.getvalue()
    labels = io.BytesIO()
    np.save(labels, np.arange(40))
    table = io.BytesIO()
    pq.write_table(
        pa.table({"features": numbers.tolist(), "label": [str(n % 4) for n in range(40)]}), table
    )
    struct_typed = io.BytesIO()
    pq.write_table(pa.table({"image": ["a.png"] * 4, "label": [{"a": 1}] * 4}), struct_typed)
    embedded = io.BytesIO()
    pq.write_table(
        pa.table({"image": [{"bytes": b"no image", "path": "a.png"}] * 4, "label": [0, 1, 0, 1]}),
        embedded,
    )
    pairs = io.BytesIO()
    pq.write_table(pa.table({"anchor": [0, 1], "kin": [1, 0]}), pairs)
    state = io.BytesIO()
    torch.save({"w": torch.arange(40.0)}, state)
    image = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(
        image, "PNG"
    )
    images = io.BytesIO()
    np.savez(
        images,
        images=np.random.default_rng(0).integers(0, 256, (20, 8, 8, 3), dtype=np.uint8),
        labels=np.arange(20) % 3,
    )
    (room / "a.png").write_bytes(image.getvalue())
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for number in range(3):
            for suffix, content in (
                (".png", image.getvalue()),
                (".txt", b"a caption"),
                (".cls", b"1"),
            ):
                info = tarfile.TarInfo(f"{number}{suffix}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    save_encoder(build_encoder("resnet10", width=1), room / "encoder")
    return [
        ("features.npy", files["a.npy"], _features),
        ("features.npz", files["a.npz"], _features),
        ("compressed.npz", files["c.npz"], _features),
        ("features.parquet", table.getvalue(), _features),
        ("features.safetensors", save({"features": torch.from_numpy(numbers)}), _features),
        ("embedded.parquet", embedded.getvalue(), _source),
        ("labels.npy", labels.getvalue(), _labels),
        ("labels.parquet", table.getvalue(), _labels),
        ("labels.csv", b"label\n" + b"\n".join(b"%d" % n for n in range(40)), _labels),
        ("labels.txt", b"\n".join(b"%d" % n for n in range(40)), _labels),
        ("images.npz", images.getvalue(), _images),
        ("table.csv", b"image,label,caption\na.png,1,one\na.png,2,two\n", _source),
        ("struct.parquet", struct_typed.getvalue(), _source),
        ("shard.tar", tar.getvalue(), _source),
        ("image.png", image.getvalue(), _image),
        ("config.yaml", TrainConfig().to_yaml().encode(), _yaml),
        ("metrics.jsonl", b'{"epoch": 1, "step": 4, "loss": 1.0}\n' * 3, _metrics),
        ("state.pt", state.getvalue(), _state),
        ("model.safetensors", (room / "encoder" / "model.safetensors").read_bytes(), _encoder),
        ("pairs.parquet", pairs.getvalue(), _pairs),
        ("pairs.csv", b"anchor,kin\n0,1\n1,0\n", _pairs),
        ("excluded.csv", b'id,key\n3,a.png\n7,"b,c.png"\n', _excluded),
        ("quarantine.csv", b"path,reason\na,b\n", _quarantine),
    ]


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def _features(path: Path) -> object:
    from kinfolk.features import Features, open_features

    found = Features(open_features(path), f"`{path}`")
    return found.rows(0, len(found))


def _labels(path: Path) -> object:
    from kinfolk.auditing.inputs import encode, read_column

    found = read_column(path).values
    return encode(found, len(found))


def _images(path: Path) -> object:
    from kinfolk.data.open_source import open_source
    from kinfolk.data.prepare import prepare

    return prepare(open_source(str(path)), image_size=8, workers=0)


_source = _images


def _image(path: Path) -> object:
    folder = path.parent / "images"
    folder.mkdir(exist_ok=True)
    path.replace(folder / path.name)
    return _images(folder)


def _yaml(path: Path) -> object:
    from kinfolk.training.config import TrainConfig
    from kinfolk.training.defaults import resolve

    return resolve(TrainConfig.load(path))


def _metrics(path: Path) -> object:
    from kinfolk.training.documents import read_rows

    return read_rows(path)


def _state(path: Path) -> object:
    from kinfolk.models.weights import read_state

    return read_state(path)


def _checkpoint(path: Path) -> object:
    from kinfolk.training.checkpoint import read_checkpoint

    return read_checkpoint(path)


def _encoder(path: Path) -> object:
    from kinfolk.models.weights import load_encoder

    return load_encoder(path)


def _tokenizer(path: Path) -> object:
    from kinfolk.data.text import read_tokenizer

    return read_tokenizer(path, 12)


def _pairs(path: Path) -> object:
    from kinfolk.detectors.known import read_known

    return read_known(path)


def _excluded(path: Path) -> object:
    from kinfolk.data.source import read_excluded

    return read_excluded(path)


def _quarantine(path: Path) -> object:
    from kinfolk.data.prepare import read_quarantine

    return read_quarantine(path)


def _npy(shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": "<f4", "fortran_order": False, "shape": shape}
    )
    return file.getvalue() + b"\0" * 64


def _npz(
    shape: tuple[int, ...], compression: int = zipfile.ZIP_STORED, name: str = "features"
) -> bytes:
    return _zipped({f"{name}.npy": _npy(shape)}, compression)


def _objects() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([_Evil()], dtype=object), allow_pickle=True)
    return file.getvalue()


def _zipped(files: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return file.getvalue()


def _safetensors(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + b"\0" * 32


def _described(text: str) -> bytes:
    """Weights whose metadata says how to build their encoder."""
    import tempfile

    import torch

    from kinfolk.files import write_safetensors

    with tempfile.TemporaryDirectory() as folder:
        write_safetensors(Path(folder) / "a.safetensors", {"w": torch.zeros(2)}, {"kinfolk": text})
        return (Path(folder) / "a.safetensors").read_bytes()


def _tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, kind, target in (
            ("../../up.png", tarfile.REGTYPE, ""),
            ("a.png", tarfile.SYMTYPE, "/etc/passwd"),
            ("b.txt", tarfile.LNKTYPE, "a.png"),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            archive.addfile(info)
    return file.getvalue()
