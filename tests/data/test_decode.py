from __future__ import annotations

import io
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from kinfolk.data.decode import (
    Decoded,
    RefusedError,
    decode,
    digest,
    read_file,
    strict_pillow,
    to_rgb,
)
from tests.data.images import noise, smooth

CAP = 50_000_000


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def decoded(data: bytes, size: int = 16) -> Decoded:
    return decode(data, size, size, CAP)


def test_lossless_pixels_come_through_unchanged() -> None:
    pixels = noise(16, 16)
    assert np.array_equal(decoded(encoded(Image.fromarray(pixels), "PNG")).pixels, pixels)


def test_not_square_is_squashed_and_its_size_is_kept() -> None:
    result = decoded(encoded(Image.fromarray(smooth(40, 80)), "PNG"))
    assert result.pixels.shape == (16, 16, 3)
    assert (result.width, result.height) == (80, 40)
    assert np.abs(result.pixels.astype(int) - smooth(16, 16)).mean() < 4


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "TGA"])
def test_every_image_format_is_decoded(kind: str) -> None:
    assert decoded(encoded(Image.fromarray(smooth(32, 32)), kind)).pixels.shape == (16, 16, 3)


def test_jpeg_is_decoded_at_reduced_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.fromarray(smooth(512, 768)), "JPEG", quality=95)
    loaded: list[tuple[int, int]] = []
    original = ImageFile.ImageFile.load

    def load(self: ImageFile.ImageFile) -> Any:
        loaded.append(self.size)
        return original(self)

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    result = decoded(data, 60)
    assert loaded[0] == (96, 64)
    assert (result.width, result.height) == (768, 512)
    assert np.abs(result.pixels.astype(int) - smooth(60, 60)).mean() < 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied_in_every_format(orientation: int) -> None:
    for kind in ["JPEG", "PNG", "WEBP", "TIFF"]:
        upright = Image.fromarray(smooth(32, 64))
        undo = {
            2: Image.Transpose.FLIP_LEFT_RIGHT,
            3: Image.Transpose.ROTATE_180,
            4: Image.Transpose.FLIP_TOP_BOTTOM,
            5: Image.Transpose.TRANSPOSE,
            6: Image.Transpose.ROTATE_90,
            7: Image.Transpose.TRANSVERSE,
            8: Image.Transpose.ROTATE_270,
        }
        stored = upright.transpose(undo[orientation]) if orientation > 1 else upright
        exif = Image.Exif()
        exif[0x0112] = orientation
        result = decoded(encoded(stored, kind, exif=exif))
        assert (result.width, result.height) == (64, 32)
        assert np.abs(result.pixels.astype(int) - smooth(16, 16)).mean() < 6


def test_broken_exif_is_no_reason_to_refuse() -> None:
    data = encoded(
        Image.fromarray(smooth(16, 16)), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff"
    )
    with strict_pillow():
        assert decoded(data).pixels.shape == (16, 16, 3)


def test_grey_is_expanded() -> None:
    grey = noise(16, 16)[..., 0]
    assert np.array_equal(
        decoded(encoded(Image.fromarray(grey), "PNG")).pixels, grey[..., None].repeat(3, -1)
    )


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    values = np.linspace(0, 65535, 256).round().astype(np.uint16).reshape(16, 16)
    expected = np.rint(values / 257).astype(np.uint8)
    for kind in ("PNG", "TIFF"):
        pixels = decoded(encoded(Image.fromarray(values), kind)).pixels
        assert np.array_equal(pixels[..., 0], expected)
        assert np.array_equal(pixels[..., 2], expected)


def test_float_tiff_is_scaled_from_0_to_1() -> None:
    values = np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)
    assert np.array_equal(
        decoded(encoded(Image.fromarray(values), "TIFF")).pixels[..., 1],
        np.rint(values * 255).astype(np.uint8),
    )
    for bad in (values * 7, values * np.nan):
        with pytest.raises(RefusedError, match="pixel values in"):
            decoded(encoded(Image.fromarray(bad), "TIFF"))


def test_cmyk_becomes_rgb() -> None:
    image = Image.fromarray(smooth(64, 64))
    pixels = decoded(encoded(image.convert("CMYK"), "JPEG", quality=95), 64).pixels
    assert np.abs(pixels.astype(int) - smooth(64, 64)).mean() < 4


def test_palettes_become_rgb() -> None:
    image = Image.fromarray(smooth(16, 16)).quantize(64)
    assert np.array_equal(decoded(encoded(image, "PNG")).pixels, np.asarray(image.convert("RGB")))


def test_alpha_is_laid_on_white() -> None:
    pixels = np.zeros((16, 16, 4), dtype=np.uint8)
    pixels[:8, :, 3] = 255
    pixels[8:, :8, 3] = 128
    result = decoded(encoded(Image.fromarray(pixels), "PNG")).pixels
    assert (result[:8] == 0).all()
    assert (result[8:, :8] == 127).all()
    assert (result[8:, 8:] == 255).all()


def test_palette_transparency_is_laid_on_white() -> None:
    image = Image.new("P", (16, 16), 0)
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.paste(1, (0, 0, 8, 16))
    for transparency in (0, b"\x00\xff"):
        result = decoded(encoded(image, "PNG", transparency=transparency)).pixels
        assert (result[:, :8] == (200, 100, 50)).all()
        assert (result[:, 8:] == 255).all()


MODES: list[str] = [
    "1",
    "L",
    "LA",
    "La",
    "P",
    "PA",
    "RGB",
    "RGBA",
    "RGBa",
    "CMYK",
    "YCbCr",
    "HSV",
    "I",
    "I;16",
    "F",
]


def test_every_mode_becomes_rgb() -> None:
    for mode in MODES:
        image = Image.new("L", (4, 4), 0).convert("PA") if mode == "PA" else Image.new(mode, (4, 4))
        assert to_rgb(image).mode == "RGB"


def test_empty_files_are_refused() -> None:
    with pytest.raises(RefusedError, match=r"empty \(0 bytes\)"):
        decoded(b"")


@pytest.mark.parametrize(
    "data",
    [
        b"hello, I am text",
        b"\x00" * 1000,
        b"<svg></svg>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    ],
)
def test_files_that_are_no_images_are_refused(data: bytes) -> None:
    with pytest.raises(RefusedError, match="not an image in a known format"):
        decoded(data)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF"])
def test_truncated_images_are_refused(kind: str) -> None:
    data = encoded(Image.fromarray(noise(64, 64)), kind)
    with strict_pillow(), pytest.raises(RefusedError):
        decoded(data[: len(data) // 2])


def test_truncated_is_refused_whatever_the_program_around_it_has_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    data = encoded(Image.fromarray(noise(64, 64)), "JPEG")
    with strict_pillow(), pytest.raises(RefusedError, match="truncated"):
        decoded(data[: len(data) // 2])
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims to be large."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunk = b"IHDR" + header
    return (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", 13)
        + chunk
        + struct.pack(">I", zlib.crc32(chunk))
        + b"\x00\x00\x00\x00IDAT"
        + b"\x35\xaf\x06\x1e"
    )


@pytest.mark.parametrize("side", [8_000, 12_000, 60_000])
def test_pixel_cap_is_read_from_the_header(side: int) -> None:
    with strict_pillow(), pytest.raises(RefusedError, match="above the cap of 50 MP"):
        decoded(bomb(side, side))


def test_pixel_cap_is_inclusive() -> None:
    data = encoded(Image.fromarray(smooth(20, 30)), "PNG")
    assert decode(data, 8, 8, 600).width == 30
    with pytest.raises(
        RefusedError, match=r"30 × 20 pixels \(0.0 MP\) are above the cap of 0.000599 MP"
    ):
        decode(data, 8, 8, 599)
    with pytest.raises(RefusedError, match="above the cap"):
        decode(smooth(20, 30), 8, 8, 599)


def test_strict_pillow_restores_limit_and_warnings() -> None:
    before = Image.MAX_IMAGE_PIXELS
    with strict_pillow():
        assert Image.MAX_IMAGE_PIXELS is None
        warnings.warn("not shown", stacklevel=1)
    assert before == Image.MAX_IMAGE_PIXELS


def test_arrays_equal_files() -> None:
    for pixels in (noise(16, 16), smooth(40, 80)):
        data = encoded(Image.fromarray(pixels), "PNG")
        assert np.array_equal(decode(pixels, 16, 16, CAP).pixels, decoded(data).pixels)
    grey = noise(16, 16, channels=1)
    assert np.array_equal(decode(grey, 16, 16, CAP).pixels, grey.repeat(3, -1))
    assert np.array_equal(decode(grey[..., 0], 16, 16, CAP).pixels, grey.repeat(3, -1))


def test_digests_differ_by_content_and_shape() -> None:
    pixels = noise(4, 6)
    digests = {
        digest(pixels),
        digest(pixels.reshape(6, 4, 3)),
        digest(pixels[::-1]),
        digest(pixels.tobytes()),
    }
    assert len(digests) == 4
    assert all(len(value) == 16 for value in digests)
    assert digest(pixels[:, ::-1]) == digest(pixels[:, ::-1].copy())


def test_read_file_returns_size_time_and_digest(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    data = encoded(Image.fromarray(noise(16, 16)), "PNG")
    path.write_bytes(data)
    read = read_file(str(path), 16, 16, CAP)
    assert (read.size_bytes, read.modified_ns, read.digest) == (
        len(data),
        path.stat().st_mtime_ns,
        digest(data),
    )
    missing = read_file(str(tmp_path / "b.png"), 16, 16, CAP)
    assert missing.pixels is None
    assert missing.reason == "can't be read: No such file or directory"
