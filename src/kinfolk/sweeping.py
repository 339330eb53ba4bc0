"""`kf.sweep` and `kinfolk sweep`: one training per combination of method, settings and seed, and the table that compares them.

A sweep is resumable: repeated with the same arguments, it continues an interrupted training, skips finished ones, and measures only what
has not been measured.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinfolk.api import evaluate, train
from kinfolk.comparing import Comparison, compare
from kinfolk.data.sample_table import Samples
from kinfolk.errors import UsageError
from kinfolk.evaluation.protocols import read_results, write_result
from kinfolk.training.config import parse_settings
from kinfolk.training.run_folder import Run

if TYPE_CHECKING:
    import os

    from kinfolk.training.train import Data

LOG = logging.getLogger("kinfolk.sweep")


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep in order, and the table over them; None if the data has no labels to measure with."""

    runs: tuple[Run, ...]
    table: Comparison | None


def sweep(
    data: Data,
    out: str | os.PathLike[str],
    *,
    methods: Sequence[str] = ("simclr",),
    settings: Mapping[str, Sequence[Any]] | None = None,
    seeds: Sequence[int] = (0,),
    protocols: Sequence[str] = ("knn", "linear"),
    common: Sequence[str] | Mapping[str, Any] = (),
    progress: bool = True,
    **arguments: Any,
) -> Sweep:
    """Trains every combination of `methods`, `settings` and `seeds`, and compares them.

    Args:
        data: as in `kf.train`.
        out: folder for the runs, each in a folder of its own that names method, settings and seed.
        methods: methods to train. A `detector.*` setting applies to methods with a detector only.
        settings: the values of each setting, `{"detector.alpha": [0.01, 0.05]}`.
        seeds: one training per seed.
        protocols: protocols of `kf.evaluate`, measured where the data has labels.
        common: settings with one value for all runs, as `settings` of `kf.train`.
        progress: shows the progress of each training.
        arguments: other arguments of `kf.train`, the same for all runs, such as `epochs` and `recipe`.
    """
    if {"method", "seed", "resume", "overwrite"} & arguments.keys():
        raise UsageError("a sweep takes `methods` and `seeds`, and resumes by itself; leave method, seed, resume and overwrite out")
    if not methods or not seeds or not all((settings or {}).values()):
        raise UsageError("a sweep needs at least one method, one seed and one value for each setting")
    names = combinations(methods, settings or {})
    runs: list[Run] = []
    for (name, (method, chosen)), seed in itertools.product(names.items(), seeds):
        folder = Path(out) / name / f"seed-{seed}"
        LOG.info("%s", f"{len(runs) + 1} of {len(names) * len(seeds)}: {folder}")
        given: dict[str, Any] = {"method": method, "seed": seed, "settings": {**parse_settings(common), **chosen}, **arguments}
        run = train(data, folder, **given, resume=(folder / "config.yaml").exists(), progress=progress)
        _measure(run, data, protocols)
        runs.append(run)
    if any(run.rank > 0 for run in runs) or not _labelled(runs[0]):
        return Sweep(tuple(runs), None)
    return Sweep(tuple(runs), compare([run.path for run in runs]))


def combinations(methods: Sequence[str], settings: Mapping[str, Sequence[Any]]) -> dict[str, tuple[str, dict[str, Any]]]:
    """(method, settings) of each combination, by the name of its folder.

    Example:
        >>> list(combinations(["simclr", "simclr+fnc"], {"detector.fraction": [0.1, 0.2]}))
        ['simclr', 'simclr+fnc,fraction=0.1', 'simclr+fnc,fraction=0.2']
    """
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for method in methods:
        keys = [key for key in settings if "+" in method or not key.startswith("detector.")]
        for values in itertools.product(*(settings[key] for key in keys)):
            chosen = dict(zip(keys, values, strict=True))
            words = [method, *(f"{key.rpartition('.')[2]}={value}" for key, value in chosen.items())]
            found[re.sub(r"[^\w.,=+:-]+", "_", ",".join(words)).replace(":", "-")] = (method, chosen)
    return found


def split_values(text: str) -> tuple[str, list[Any]]:
    """`detector.alpha=0.01,0.05` as a key and its values. Commas within brackets belong to a value.

    Example:
        >>> split_values("detector.num_clusters=[10,30],[100]")
        ('detector.num_clusters', [[10, 30], [100]])
    """
    key, equals, values = text.partition("=")
    parts = re.split(r",(?![^\[]*\])", values)
    if not equals or not all(part.strip() for part in parts):
        raise UsageError(f"a setting of a sweep must have the form KEY=VALUE,VALUE, as in detector.alpha=0.01,0.05; received {text!r}")
    return key.strip(), [parse_settings([f"{key}={part}"])[key.strip()] for part in parts]


def _measure(run: Run, data: Data, protocols: Sequence[str]) -> None:
    """Measures what has not been measured since the training."""
    if run.rank > 0 or not _labelled(run):
        return
    done = read_results(run.path) if run.unchanged else {}
    for protocol in protocols:
        if protocol not in done:
            write_result(run.path, protocol, evaluate(run, data, protocol))


def _labelled(run: Run) -> bool:
    labels = Samples.read(run.samples).labels
    return labels is not None and bool((labels >= 0).any())
