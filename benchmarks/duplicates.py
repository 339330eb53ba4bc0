"""Near-duplicates: precision and recall on real images with planted copies, beside perceptual
hashes.

    pip install imagehash
    .venv/bin/python benchmarks/duplicates.py tinyimagenet15.npz [cifar10.npz …] [--number 1000]

From each file of arrays (`x_train`) three sets are made: 1,000 images with 160 planted copies (40
resized to three quarters, 40 cropped by up to a sixteenth at each side, 40 saved as JPEG of quality
30, 40 mirrored), 1,000 other images without any, and these once more between white bars at both
sides. The audit searches them with patch features. Of each method: recall for each kind, precision
over all pairs that it joins, and the number of pairs it joins without copies (plain, with bars).
Some of these may be real copies, so they are listed by row. The peer joins pairs of
`imagehash.phash` (64 bits) that differ in at most 8 bits, mirrored ones included; if imagehash is
missing it is left out.
"""

from __future__ import annotations

import argparse
import io
import tempfile
from itertools import combinations
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

KINDS = ("resized", "cropped", "recompressed", "mirrored")
COPIES, BITS = 40, 8
Pairs = set[tuple[int, int]]


def copy_of(image: Image.Image, kind: str, random: np.random.Generator) -> Image.Image:
    """A copy of an image as people make them."""
    width, height = image.size
    if kind == "resized":
        return image.resize((width * 3 // 4, height * 3 // 4), Image.Resampling.LANCZOS)
    if kind == "cropped":
        left, right = random.integers(0, width // 16 + 1, 2)
        top, bottom = random.integers(0, height // 16 + 1, 2)
        return image.crop((int(left) + 1, int(top) + 1, width - int(right), height - int(bottom)))
    if kind == "recompressed":
        file = io.BytesIO()
        image.save(file, "JPEG", quality=30)
        return Image.open(file).convert("RGB")
    return ImageOps.mirror(image)


def by_audit(folder: Path, _: list[Image.Image]) -> Pairs:
    """Pairs within the groups of `kf.audit`."""
    import kinfolk as kf
    from kinfolk.auditing.inputs import read_input

    found = read_input(folder, progress=False)
    groups = kf.audit(found.features, 0.01, images=found.images).groups
    pairs: Pairs = set()
    for group in np.unique(groups["group"]):
        pairs |= set(combinations(sorted(groups["sample"][groups["group"] == group].tolist()), 2))
    return pairs


def by_hash(_: Path, images: list[Image.Image]) -> Pairs:
    """Pairs whose perceptual hashes differ in few bits."""
    import imagehash

    plain = np.stack([imagehash.phash(image).hash.ravel() for image in images])
    flipped = np.stack([imagehash.phash(ImageOps.mirror(image)).hash.ravel() for image in images])
    pairs: Pairs = set()
    for at, row in enumerate(plain):
        for hashes in (plain, flipped):
            near = np.flatnonzero((hashes[at + 1 :] != row).sum(1) <= BITS)
            pairs |= {(at, int(other) + at + 1) for other in near}
    return pairs


def search(method: str, images: list[Image.Image]) -> Pairs:
    """The pairs that a method joins, by position."""
    with tempfile.TemporaryDirectory() as folder:
        for at, image in enumerate(images):
            image.save(Path(folder) / f"{at:05}.png")
        return (by_audit if method == "kinfolk" else by_hash)(Path(folder), images)


def with_bars(image: Image.Image) -> Image.Image:
    """The image between white bars that take a quarter of its width."""
    width, height = image.size
    framed = Image.new("RGB", (width, height), (255, 255, 255))
    framed.paste(image.resize((width * 3 // 4, height)), (width // 8, 0))
    return framed


def measure(path: Path, number: int) -> None:
    """Prints the rows of one file."""
    random = np.random.default_rng(0)
    with np.load(path) as arrays:
        chosen = random.permutation(len(arrays["x_train"]))[: 2 * number]
        images = [Image.fromarray(pixels) for pixels in arrays["x_train"][chosen]]
    images, others = images[:number], images[number:]
    copied = random.permutation(number)[: COPIES * len(KINDS)]
    planted = {
        kind: [(int(at), number + place) for place, at in enumerate(copied) if place % 4 == index]
        for index, kind in enumerate(KINDS)
    }
    copies = [
        copy_of(images[at], KINDS[place % 4], random) for place, at in enumerate(copied.tolist())
    ]
    every = {pair for pairs in planted.values() for pair in pairs}
    for method in ("kinfolk", "phash"):
        try:
            found, wrong = search(method, images + copies), search(method, others)
            barred = search(method, [with_bars(image) for image in others])
        except ModuleNotFoundError as error:
            print(f"| {path.stem} | {method} is left out: {error} |")
            continue
        recall = [f"{np.mean([pair in found for pair in planted[kind]]):.2f}" for kind in KINDS]
        precision = len(found & every) / max(1, len(found))
        cells = [path.stem, method, *recall, f"{precision:.2f}", f"{len(wrong)}, {len(barred)}"]
        print(f"| {' | '.join(cells)} |", flush=True)
        extra = sorted(found - every)[:8]
        if extra or wrong:
            shown = [(int(chosen[a]), int(chosen[b])) for a, b in extra if b < number]
            beyond = [
                (int(chosen[number + a]), int(chosen[number + b])) for a, b in sorted(wrong)[:8]
            ]
            print(f"  not planted, by row of x_train: {shown}; without copies: {beyond}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, nargs="+")
    parser.add_argument("--number", type=int, default=1000)
    given = parser.parse_args()
    print(f"| data | method | {' | '.join(KINDS)} | precision | joined without copies |")
    print("|---|---|---|---|---|---|---|---|")
    for path in given.data:
        measure(path, given.number)


if __name__ == "__main__":
    main()
