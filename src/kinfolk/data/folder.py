"""A folder of image files, with splits and classes from its sub-folders."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from kinfolk.data.labels import SPLITS
from kinfolk.data.source import FileSource, Item, Refusals
from kinfolk.errors import KinfolkError, UsageError, short

LOG = logging.getLogger("kinfolk.data")
# Also formats that can't be decoded: better refused by name than left out silently.
_IMAGE = frozenset(
    """.jpg .jpeg .jpe .jfif .png .apng .webp .gif .bmp .dib .tif .tiff .ppm .pgm .pbm .pnm .jp2
    .j2k .jpx .avif .tga .ico .heic .heif .svg .psd .eps .dng .cr2 .nef .arw""".split()  # noqa: SIM905
)
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"II*\x00", b"MM\x00*")


def open_folder(root: Path, *, labels_from_folders: bool = False) -> FileSource:
    """All images below `root`, sorted by their relative path. `train/` at the top, alone or with
    `test/` or `val/` (see `SPLITS`), makes splits; otherwise everything is "train"."""
    try:
        entries = list(os.scandir(root))
    except OSError as error:
        raise KinfolkError(
            f"the folder `{short(str(root))}` can't be read: {error.strerror}"
        ) from error
    tops = sorted(each.name for each in entries if _is_folder(each) and not _is_hidden(each.name))
    splits = {name: SPLITS[name.lower()] for name in tops if name.lower() in SPLITS}
    if "train" not in splits.values() or (len(splits) == 1 and len(tops) > 1):
        splits = {}
    outside = f"outside the split folders {', '.join(f'{name}/' for name in splits)}"
    found: list[tuple[str, str, str, str | None]] = []
    refused: Refusals = []
    others = 0
    for parts, path, is_regular in _walk(str(root), (), (), refused):
        key = _to_text("/".join(parts))
        kind = _inspect(path, is_regular)
        if kind == "other":
            others += 1
        elif kind != "image":
            refused.append((key, kind))
        elif splits and (len(parts) == 1 or parts[0] not in splits):
            refused.append((key, outside))
        else:
            within = parts[1:] if splits else parts
            split = splits[parts[0]] if splits else "train"
            found.append((key, path, split, _to_text(within[0]) if len(within) > 1 else None))
    if not found and not refused:
        raise KinfolkError(
            f"`{root}` contains no images" + (f", only {others:,} other files" if others else "")
        )
    found.sort()
    for (first, *_), (second, *_) in pairwise(found):
        if first == second:
            raise KinfolkError(
                f"two files have the same name once written as text, `{short(first)}`; rename one"
                " of them"
            )
    classes = sorted({name for *_, name in found if name is not None})
    if labels_from_folders and not classes:
        raise UsageError(
            f"`labels_from_folders` needs a folder per class below `{root}`; all images are at its"
            " top level"
        )
    if not labels_from_folders:
        if len(classes) > 1 and all(name is not None for *_, name in found):
            some = ", ".join(map(short, classes[:3])) + (", …" if len(classes) > 3 else "")
            LOG.info(
                "%s",
                f"`{short(str(root))}` has {len(classes):,} folders ({some}); if they are classes,"
                " --labels-from-folders makes them labels",
            )
        classes = []
    label_of: dict[str | None, int] = {name: label for label, name in enumerate(classes)}
    items = [Item(key, label_of.get(name), split, origin=path) for key, path, split, name in found]
    return FileSource(f"`{root}`", items, classes=classes or None, refused=sorted(refused))


def is_image_name(name: str) -> bool:
    """Whether a file name has the extension of an image format."""
    return os.path.splitext(name)[1].lower() in _IMAGE


def _walk(
    folder: str, parts: tuple[str, ...], above: tuple[tuple[int, int], ...], refused: Refusals
) -> Iterator[tuple[tuple[str, ...], str, bool]]:
    """Yields (path parts, path, whether it is certainly a regular file) of every file that is not
    hidden. Links to folders are followed unless they lead back; a folder that can't be read is
    added to `refused`."""
    try:
        here = os.stat(folder)
        if (here.st_dev, here.st_ino) in above:
            return
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        path = "/".join(map(_to_text, parts)) + "/"
        refused.append((path, f"the folder can't be read: {error.strerror}"))
        return
    above = (*above, (here.st_dev, here.st_ino))
    for entry in entries:
        if _is_hidden(entry.name):
            continue
        if _is_folder(entry):
            yield from _walk(entry.path, (*parts, entry.name), above, refused)
        else:
            yield (*parts, entry.name), entry.path, entry.is_file(follow_symlinks=False)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _inspect(path: str, is_regular: bool) -> str:
    """Returns "image", "other", or the reason why an image file is refused unread."""
    is_named_image = is_image_name(path)
    try:
        if not is_regular and not stat.S_ISREG(os.stat(path).st_mode):
            return "not a regular file" if is_named_image else "other"
        if is_named_image:
            return "image"
        with open(path, "rb") as file:
            head = file.read(12)
    except OSError as error:
        if not is_named_image:
            return "other"
        is_link = os.path.islink(path)
        gone, unreadable = (
            "a link to a file that does not exist",
            f"can't be read: {error.strerror}",
        )
        return gone if is_link else unreadable
    is_webp = head[:4] == b"RIFF" and head[8:] == b"WEBP"
    return "image" if head.startswith(_MAGIC) or is_webp else "other"


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _to_text(name: str) -> str:
    """A file name as text that every table can hold: bytes that are not UTF-8 become \\xNN."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
