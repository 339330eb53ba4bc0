"""A folder of image files, with splits and classes from its sub-folders."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import final

from kinfolk.data.labels import SPLITS
from kinfolk.data.source import Item, Source
from kinfolk.errors import KinfolkError, UsageError, shown

LOG = logging.getLogger("kinfolk.data")
# Also formats that can't be decoded: better refused by name than left out silently.
_IMAGE = frozenset(
    """.jpg .jpeg .jpe .jfif .png .apng .webp .gif .bmp .dib .tif .tiff .ppm .pgm .pbm .pnm .jp2
    .j2k .jpx .avif .tga .ico .heic .heif .svg .psd .eps .dng .cr2 .nef .arw""".split()  # noqa: SIM905
)
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"II*\x00", b"MM\x00*")


@final
class FileSource(Source):
    """Samples that are files, found in a folder or listed in a table."""

    def __init__(
        self,
        name: str,
        items: list[Item],
        paths: list[str],
        classes: list[str] | None,
        refused: list[tuple[str, str]],
    ) -> None:
        self.name, self.classes, self.refused, self.native_size = name, classes, refused, None
        self._items, self._paths = items, paths

    def load(self, index: int) -> bytes:
        return Path(self._paths[index]).read_bytes()

    def path(self, index: int) -> str:
        return self._paths[index]

    def stat(self, index: int) -> tuple[int, int] | None:
        try:
            found = os.stat(self._paths[index])
        except OSError:
            return None
        return found.st_size, found.st_mtime_ns

    def release(self) -> None:
        super().release()
        self._paths = []


def open_folder(root: Path, *, labels_from_folders: bool = False) -> FileSource:
    """All images below `root`, sorted by their relative path.

    `train/` (or `training/`) at the top, alone or with `test/`, `testing/`, `val/`, `valid/` or
    `validation/`, makes splits; otherwise everything is "train". Upper and lower case do not
    matter.
    """
    try:
        tops = sorted(
            entry.name
            for entry in os.scandir(root)
            if _is_folder(entry) and not _hidden(entry.name)
        )
    except OSError as error:
        raise KinfolkError(
            f"the folder `{shown(str(root))}` can't be read: {error.strerror}"
        ) from error
    splits = {name: SPLITS[name.lower()] for name in tops if name.lower() in SPLITS}
    if "train" not in splits.values() or (len(splits) == 1 and len(tops) > 1):
        splits = {}
    found: list[tuple[str, str, str, str | None]] = []
    refused: list[tuple[str, str]] = []
    others = 0
    for parts, path, plain in _walk(str(root), (), (), refused):
        key = _text("/".join(parts))
        verdict = _inspect(path, plain)
        if verdict == "other":
            others += 1
        elif verdict != "image":
            refused.append((key, verdict))
        elif splits and (len(parts) == 1 or parts[0] not in splits):
            refused.append(
                (key, f"outside the split folders {', '.join(f'{name}/' for name in splits)}")
            )
        else:
            within = parts[1:] if splits else parts
            found.append(
                (
                    key,
                    path,
                    splits[parts[0]] if splits else "train",
                    _text(within[0]) if len(within) > 1 else None,
                )
            )
    if not found and not refused:
        raise KinfolkError(
            f"`{root}` contains no images" + (f", only {others:,} other files" if others else "")
        )
    found.sort()
    _refuse_equal_names([key for key, *_ in found])
    folders = sorted({folder for *_, folder in found if folder is not None})
    if (
        not labels_from_folders
        and len(folders) > 1
        and all(folder is not None for *_, folder in found)
    ):
        some = ", ".join(map(shown, folders[:3])) + (", …" if len(folders) > 3 else "")
        LOG.info(
            "%s",
            f"`{shown(str(root))}` has {len(folders):,} folders ({some}); if they are classes,"
            " --labels-from-folders makes them labels",
        )
    classes = folders if labels_from_folders else None
    if classes == []:
        raise UsageError(
            f"`labels_from_folders` needs a folder per class below `{root}`; all images are at its"
            " top level"
        )
    index = {name: number for number, name in enumerate(classes or [])}
    items = [
        Item(key, index.get(folder) if folder is not None else None, split)
        for key, _, split, folder in found
    ]
    return FileSource(f"`{root}`", items, [path for _, path, *_ in found], classes, sorted(refused))


def is_image_name(name: str) -> bool:
    """Whether a file name has the extension of an image format."""
    return os.path.splitext(name)[1].lower() in _IMAGE


def _walk(
    folder: str,
    parts: tuple[str, ...],
    above: tuple[tuple[int, int], ...],
    refused: list[tuple[str, str]],
) -> Iterator[tuple[tuple[str, ...], str, bool]]:
    """Yields (path parts, path, whether it is certainly a regular file) of every file that is not
    hidden.

    A link to a folder is followed unless it leads back to one above it. A folder that can't be read
    is added to `refused`.
    """
    try:
        here = os.stat(folder)
        if (here.st_dev, here.st_ino) in above:
            return
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        refused.append(
            ("/".join(map(_text, parts)) + "/", f"the folder can't be read: {error.strerror}")
        )
        return
    above = (*above, (here.st_dev, here.st_ino))
    for entry in entries:
        if _hidden(entry.name):
            continue
        if _is_folder(entry):
            yield from _walk(entry.path, (*parts, entry.name), above, refused)
        else:
            yield (*parts, entry.name), entry.path, entry.is_file(follow_symlinks=False)


def folders_below(folder: str, above: tuple[tuple[int, int], ...] = ()) -> Iterator[str]:
    """Yields `folder` and every folder below it whose files `open_folder` lists, including those
    that can't be read."""
    below: list[str] = []
    try:
        here = os.stat(folder)
        if (here.st_dev, here.st_ino) in above:
            return
        above = (*above, (here.st_dev, here.st_ino))
        below = sorted(
            entry.path
            for entry in os.scandir(folder)
            if _is_folder(entry) and not _hidden(entry.name)
        )
    except OSError:
        pass
    yield folder
    for path in below:
        yield from folders_below(path, above)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _inspect(path: str, plain: bool) -> str:
    """Returns "image", "other", or the reason why an image file is refused unread. `plain`: it is
    known to be a regular file."""
    extension = os.path.splitext(path)[1].lower()
    try:
        if not plain and not stat.S_ISREG(os.stat(path).st_mode):
            return "not a regular file" if extension in _IMAGE else "other"
        if extension in _IMAGE:
            return "image"
        with open(path, "rb") as file:
            head = file.read(12)
    except OSError as error:
        if extension not in _IMAGE:
            return "other"
        return (
            "a link to a file that does not exist"
            if os.path.islink(path)
            else f"can't be read: {error.strerror}"
        )
    return (
        "image"
        if head.startswith(_MAGIC) or (head[:4] == b"RIFF" and head[8:] == b"WEBP")
        else "other"
    )


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _text(name: str) -> str:
    """A file name as text that every table can hold: bytes that are not UTF-8 are shown as
    \\xNN."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _refuse_equal_names(keys: list[str]) -> None:
    for first, second in pairwise(keys):
        if first == second:
            raise KinfolkError(
                f"two files have the same name once written as text, `{shown(first)}`; rename one"
                " of them"
            )
