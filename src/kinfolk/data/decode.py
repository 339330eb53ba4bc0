"""Decoding an image file to uint8 pixels, at reduced scale if the format allows it.

This file is also the program of a decoding worker, which imports only numpy and Pillow;
`multiprocessing` would import the user's script and PyTorch.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

# decoded in this process; PostScript, for example, would start another program
_FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "TGA")
_MAX_FILE_BYTES = 1 << 30

_ORIENTATION = 0x0112

Place = str | tuple[str, int, int]
"""A file, or (file, offset, length) of a part of one."""


class RefusedError(Exception):
    """The message is the reason."""


class Decoded(NamedTuple):
    """Pixels (H, W, 3) uint8, and the size of the original after EXIF rotation."""

    pixels: npt.NDArray[np.uint8]
    width: int
    height: int


class Read(NamedTuple):
    size_bytes: int
    modified_ns: int
    digest: str = ""
    width: int = 0
    height: int = 0
    pixels: npt.NDArray[np.uint8] | None = None
    reason: str | None = None


def read_bytes(place: Place) -> bytes:
    path, offset, length = (place, 0, -1) if isinstance(place, str) else place
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read(length)
    if len(data) < length:
        raise RefusedError("truncated: the archive ends within it")
    return data


def read_file(
    place: Place, height: int, width: int, pixel_cap: int, with_digest: bool = True
) -> Read:
    size_bytes = modified_ns = 0
    try:
        status = os.stat(place if isinstance(place, str) else place[0])
        size_bytes = status.st_size if isinstance(place, str) else place[2]
        modified_ns = status.st_mtime_ns
        if size_bytes > _MAX_FILE_BYTES:
            raise RefusedError(f"the file has {size_bytes:,} bytes, more than {_MAX_FILE_BYTES:,}")
        data = read_bytes(place)
        found = decode(data, height, width, pixel_cap)
    except OSError as error:
        reason = f"can't be read: {error.strerror or error}"
        return Read(size_bytes, modified_ns, reason=reason)
    except RefusedError as error:
        return Read(size_bytes, modified_ns, reason=str(error))
    name = digest(data) if with_digest else ""
    return Read(size_bytes, modified_ns, name, found.width, found.height, found.pixels)


def decode(data: bytes | npt.NDArray[Any], height: int, width: int, pixel_cap: int) -> Decoded:
    """Squashed to `height` × `width`, not cropped."""
    if isinstance(data, np.ndarray):
        _check_cap(data.shape[1], data.shape[0], pixel_cap)
        if data.shape == (height, width, 3) and data.dtype == np.uint8:
            return Decoded(data, width, height)
        image: Image.Image = Image.fromarray(
            np.ascontiguousarray(data[..., 0] if data.shape[2:] == (1,) else data)
        )
        return squash(image, height, width)
    if not data:
        raise RefusedError("the file is empty (0 bytes)")
    try:
        with Image.open(io.BytesIO(data), formats=_supported_formats()) as image:
            stored = image.size
            _check_cap(*stored, pixel_cap)
            image.draft(None, (width, height))
            drafted = image.size
            image.load()
            return squash(image, height, width, stored if image.size == drafted else None)
    except RefusedError:
        raise
    except UnidentifiedImageError as error:
        raise RefusedError("not an image in a known format") from error
    except Exception as error:  # decoders raise nearly anything on a broken file
        text = " ".join(str(error).split()) or type(error).__name__
        raise RefusedError(f"can't be decoded: {text}") from error


def squash(
    image: Image.Image, height: int, width: int, size: tuple[int, int] | None = None
) -> Decoded:
    """`size`: (width, height) of the file, if it was decoded at reduced scale."""
    upright, size = image, size or image.size
    with suppress(Exception):  # a broken EXIF block does not make the image unusable
        if image.getexif().get(_ORIENTATION, 1) != 1:
            upright = ImageOps.exif_transpose(image)
    rgb = to_rgb(upright)
    if rgb.size != (width, height):
        rgb = rgb.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0)
    if upright.size != image.size:
        size = size[1], size[0]
    return Decoded(np.array(rgb, dtype=np.uint8), *size)


def to_rgb(image: Image.Image) -> Image.Image:
    """16 bits are scaled to 8, transparency is on white."""
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_to_bytes(np.asarray(image), image.mode)).convert("RGB")
    if image.has_transparency_data:
        rgba = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        page = Image.new("RGB", rgba.size, "white")
        page.paste(rgba, mask=rgba.getchannel("A"))
        return page
    return image if image.mode == "RGB" else image.convert("RGB")


def digest(data: bytes | npt.NDArray[Any]) -> str:
    """Identifies the content, and the shape of an array."""
    state = hashlib.blake2b(digest_size=8)
    if isinstance(data, np.ndarray):
        state.update(f"{data.dtype.str}{data.shape}".encode())
        state.update(np.ascontiguousarray(data).data)
    else:
        state.update(data)
    return state.hexdigest()


@contextmanager
def strict_pillow() -> Iterator[None]:
    cap, truncated = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
    Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = None, False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = cap, truncated


def _to_bytes(values: npt.NDArray[Any], mode: str) -> npt.NDArray[np.uint8]:
    low, high, top = values.min(), values.max(), 1.0 if mode == "F" else 65535.0
    if not (low >= 0 and high <= top):
        raise RefusedError(f"pixel values in [{low:g}, {high:g}]; must be in [0, {top:g}]")
    return np.rint(values.astype(np.float64) * (255.0 / top)).astype(np.uint8)


def _check_cap(width: int, height: int, pixel_cap: int) -> None:
    if width * height > pixel_cap:
        raise RefusedError(
            f"{width} × {height} pixels ({width * height / 1e6:.1f} MP) are above the cap of"
            f" {pixel_cap / 1e6:g} MP"
        )
    if width < 1 or height < 1:
        raise RefusedError("the image has no pixels")


def _supported_formats() -> list[str]:
    Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]


def main() -> None:
    """The worker: reads lists of places from standard input until it ends (also when the parent
    dies), and writes the results to standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    setting = json.loads(sys.argv[3])
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a decoder prints must not mix with the answers
    answers.write(b"ready\n")
    answers.flush()
    with strict_pillow(), suppress(EOFError):
        while True:
            places = pickle.load(requests)
            reads = [tuple(read_file(place, *setting)) for place in places]
            pickle.dump(reads, answers, protocol=5)
            answers.flush()


if __name__ == "__main__":
    main()
