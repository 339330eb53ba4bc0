"""What the command is pointed at: features, and where there are any the pictures, names and labels of their rows."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinfolk.auditing.gallery import TILE
from kinfolk.auditing.of_run import class_names, run_material
from kinfolk.errors import UsageError

if TYPE_CHECKING:
    from kinfolk.data.images import ImageData


@dataclass(frozen=True)
class Material:
    """Features as a path or array; the rest where it is known."""

    features: Any
    labels: list[Any] | None = None
    names: list[str] | None = None
    images: ImageData | None = None


@contextmanager
def features_and_images(
    features: Path, images: str | None = None, labels_from_folders: bool = False, workers: int | None = None, progress: bool = True
) -> Iterator[Material]:
    """A run brings its own pictures; for a file they are read from `images`, whose samples must be its rows."""
    if (features / "config.yaml").is_file():
        if images is not None:
            raise UsageError(f"`{features}` is a run, which has its own pictures; leave out --images")
        array, labels, names, data = run_material(features, progress)
        yield Material(array, labels, names, data)
        return
    if images is None:
        yield Material(features)
        return
    from kinfolk.data.prepare import prepare
    from kinfolk.data.sources import open_source

    source = open_source(images, labels_from_folders=labels_from_folders)
    with tempfile.TemporaryDirectory(prefix="kinfolk-audit-") as cache:
        data = prepare(source, image_size=TILE, workers=workers, cache_dir=Path(cache), progress=progress)
        if data.quarantine:
            path, reason = data.quarantine[0]
            raise UsageError(
                f"{len(data.quarantine):,} pictures of `{images}` can't be read (the first is {path}: {reason}), so its samples are "
                "not the rows of the features; remove them there and here, or leave out --images"
            )
        yield Material(features, class_names(data, len(data)), list(data.samples.keys), data)
