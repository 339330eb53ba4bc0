"""Methods × seeds on an array file: nearest neighbours, linear probe, false negatives found, time; mean ± deviation, test against the base.

    .venv/bin/python benchmarks/study.py STUDY.yaml --data FILE.npz [--limit 8000] [--seeds 0 1 2] [--only METHOD …] [--out runs/study]

A study is a document: a recipe to start from, settings for all, and for each method what differs. Every run is trained and
evaluated by the command line, so a study that was stopped goes on where it was, and a finished run is not repeated. The base of
`framework+detector` is `framework`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import yaml

COLUMNS = ("knn", "linear", "precision", "recall", "f1", "flagged")


def limited(data: Path, limit: int | None, out: Path) -> Path:
    """The array file, cut to its first `limit` training pictures."""
    if limit is None:
        return data
    cut = out / f"{data.stem}-{limit}.npz"
    if not cut.exists():
        with np.load(data) as arrays:
            kept = {name: arrays[name] for name in ("x_train", "y_train", "x_test", "y_test")}
        kept |= {name: kept[name][:limit] for name in ("x_train", "y_train")}
        out.mkdir(parents=True, exist_ok=True)
        np.savez(cut.with_suffix(".partial.npz"), **kept)
        cut.with_suffix(".partial.npz").replace(cut)
    return cut


def settings(tree: dict[str, Any], prefix: str = "") -> list[str]:
    """`{"detector": {"alpha": 0.1}}` as `detector.alpha=0.1`."""
    flat: list[str] = []
    for key, value in tree.items():
        flat += settings(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}={json.dumps(value)}"]
    return flat


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """`change` laid over `base`, section by section."""
    both = dict(base)
    for key, value in change.items():
        both[key] = merged(both[key], value) if isinstance(value, dict) and isinstance(both.get(key), dict) else value
    return both


def run(folder: Path, recipe: str, name: str, change: dict[str, Any], data: Path, seed: int) -> dict[str, float]:
    """Trains and evaluates where that is not done yet; the figures of the run."""
    kinfolk = [sys.executable, "-m", "kinfolk"]
    results = folder / "eval"
    if not (results / "linear.json").exists():
        method = method_of(name, change)
        sets = [part for text in settings(change) for part in ("--set", text)]
        how = ["--resume"] if (folder / "config.yaml").exists() else ["--recipe", recipe, "--method", method, *sets]
        print(f"· {folder.name}", flush=True)
        subprocess.run([*kinfolk, "train", "--data", data, "--out", folder, "--seed", str(seed), "--no-report", *how], check=True)
        subprocess.run([*kinfolk, "eval", folder, "--data", data, "--protocol", "knn,linear"], check=True)
    epochs = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {key: 100 * epochs[-1][key] for key in COLUMNS if isinstance(epochs[-1].get(key), float)}
    accuracy = {key: 100 * json.loads((results / f"{key}.json").read_text())["accuracy"] for key in ("knn", "linear")}
    return {**found, **accuracy, "seconds": statistics.median(epoch["seconds"] for epoch in epochs)}


def method_of(name: str, change: dict[str, Any]) -> str:
    """A study may name the same method twice, with another setting in brackets: `simclr+glofnd (alpha 0.01)`."""
    return str(change.pop("method", name.partition(" ")[0]))


def cell(values: list[float]) -> str:
    if not values:
        return "–"
    return f"{statistics.mean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")


def p_value(ours: list[float], base: list[float]) -> str:
    """One-sided paired t-test over seeds that the method is above its base."""
    if len(ours) < 2 or len(ours) != len(base):
        return "–"
    from scipy.stats import ttest_rel

    p = float(ttest_rel(ours, base, alternative="greater").pvalue)
    return "–" if math.isnan(p) else f"{p:.3f}"


def table(figures: dict[str, list[dict[str, float]]]) -> str:
    """Markdown."""
    lines = [
        "| method | kNN | linear | against its base | p (linear) | precision | recall | F1 | flagged | s / epoch |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in figures.items():
        base = figures.get(name.partition("+")[0], [])
        column = {key: [one[key] for one in runs if key in one] for key in (*COLUMNS, "seconds")}
        other = {key: [one[key] for one in base] for key in ("knn", "linear")}
        against = "–"
        if base and base is not runs:
            gain = {key: statistics.mean(column[key]) - statistics.mean(other[key]) for key in other}
            against = f"{gain['knn']:+.1f} / {gain['linear']:+.1f}"
        p = p_value(column["linear"], other["linear"]) if base is not runs else "–"
        cells = [cell(column["knn"]), cell(column["linear"]), against, p, *(cell(column[key]) for key in (*COLUMNS[2:], "seconds"))]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="array file with x_train, y_train, x_test, y_test")
    parser.add_argument("--limit", type=int, help="only the first training pictures")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", help="only these methods of the study")
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    options = parser.parse_args()
    study = yaml.safe_load(options.study.read_text(encoding="utf-8"))
    out = options.out / options.study.stem / f"{options.data.stem}-{options.limit or 'all'}"
    data = limited(options.data, options.limit, out)
    chosen = {name: change or {} for name, change in study["methods"].items() if options.only is None or name in options.only}
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
    for seed in options.seeds:
        for name, change in chosen.items():
            folder = out / f"{name.replace(':', '-').replace(' ', '_').replace('(', '').replace(')', '')}-{seed}"
            figures[name].append(run(folder, study["recipe"], name, merged(study.get("settings", {}), change), data, seed))
    text = table(figures)
    (out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(f"\n{options.study.stem}: {data.name}, recipe {study['recipe']}, seeds {options.seeds}; percent\n\n{text}")


if __name__ == "__main__":
    main()
