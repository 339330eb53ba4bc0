"""A queue of trainings: methods × data sets × seeds, evaluated and kept as one small file of
results.

    .venv/bin/python benchmarks/study.py STUDY.yaml --data FILE.npz [--limit 8000] [--seeds 0 1 2] [--only METHOD …] [--out runs/study]
    .venv/bin/python benchmarks/study.py STUDY.yaml --data TRAIN.csv --test TEST.csv …
    .venv/bin/python benchmarks/study.py STUDY.yaml --data-dir FOLDER [--stage NAME …] [--hours 2] [--beside 2] [--list]

A study is a document: a recipe to start from, settings for all, and for each method what differs, a
recipe of its own included. Every run is trained and evaluated by the command line, so a study that
was stopped goes on where it was, and a finished run is not repeated.

A document with `datasets` and `stages` is a queue: it runs stage by stage, in the order of the
document, seed by seed, data set by data set. Each finished run becomes a record of
`benchmarks/results/STUDY.json` (figures, curves over the epochs, the CPU seconds of its training
for each epoch, and the version of the code); a run that was stopped leaves none, and one that was
resumed has no CPU seconds. `--hours` starts no further run after that time, `--beside` makes
several runs at a time (with OMP_NUM_THREADS=1 two single-threaded runs do more than one with two
threads). `--list` shows what is done and what is to do.

    datasets: {cifar100: {file: cifar100.npz, limit: 8000, settings: {…}}}     files in --data-dir;
                                                                               settings of this data
                                                                               set
    datasets: {tuning: {file: gtsrb.npz, held_out: 0.2, by: track_train}}      tested on a part of
                                                                               the training images,
                                                                               whole groups of `by`
    datasets: {cifar20: {file: cifar100.npz, coarser: [fine_to_coarse]}}       labels are the class
                                                                               that this array has
                                                                               for each class
    stages: [{name: screening, datasets: […], methods: […], seeds: [0]}]       each part may be left
                                                                               out: all of them,
                                                                               seed 0
    methods: {NAME: {labels: track_train}}                  the oracle goes by this array of the
                                                            file, not by the classes
    methods: {NAME: {labels: {precision: 0.5, recall: 0.3}}}    or by the classes, corrupted to
                                                                about these
    methods: {NAME: {files: {pairs: near}}}                 `detector.pairs` is the file that the
                                                            data set names `near` under its `files`;
                                                            `{seed}` in its name is the seed;
                                                            `model.init: …` is another section

    probes: {100: 0.001, 10: 0.01, 1: 0.1}      in the place of `protocol`: kNN, and the linear
                                                probe on these percent of the labels with this ℓ2
                                                strength, not chosen anew for each run; seconds
                                                instead of minutes

    protocol: linear,finetune --percent 1,10    protocols of `kinfolk eval`, then more of its
                                                options
    protocol: transfer --own-mean               measured on each of `--test`, one or several data
                                                sets
    report: true                                each run gets its report.html
    curves: [features_nmi]                      curves.html: these figures over the epochs, drawn by
                                                benchmarks/curves.py

With `protocol: retrieval`, of methods that learn from captions, the figures are recalls in both
directions. The base of `framework+detector` is `framework`, or for all methods what the document
names as `base`; of `method (setting)` the one with the same setting, where there is one. "Gap
closed" is (method − base) / (SupCon − base) of the linear probe, seeds averaged, where SupCon is
`base+oracle:attract` of the same study.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import curves
import numpy as np
import yaml
from study_queue import Job, Results, corrupted, folder_name, jobs, version

from kinfolk.comparing.runs import figures_of
from kinfolk.comparing.table import ORACLES, base_of, oracle_of, p_value
from kinfolk.report.record import Record, read_record
from kinfolk.report.results import figures_of_result
from kinfolk.training.settings import flat

__all__ = [
    "base_of",
    "figures_of_result",
    "gap_closed",
    "main",
    "merged",
    "method_of",
    "recall_table",
    "settings",
    "table",
]

COLUMNS = ("knn", "linear", "precision", "recall", "f1", "flagged")
CLUSTERS = {
    "mtpr": "MTPR",
    "mtnr": "MTNR",
    "nmi": "NMI",
    "tp_similarity": "TP similarity",
    "fn_similarity": "FN similarity",
}
"""Columns of methods that cluster, and similarities of true positives and false negatives; left out
where no run has them."""
PARTS = ("semi ", "finetune ", "transfer ")
"""Figures with a column for each share of the labels or data set, where a run has them."""
CPU_SECONDS = "cpu_seconds.txt"
"""In the folder of a run: the CPU seconds of its training, if it was made in one go."""
RECALLS = tuple(f"{short} R@{k}" for short in ("i→t", "t→i") for k in (1, 5, 10))


def format_spread(values: Sequence[float], digits: int = 1) -> str:
    """Mean ± standard deviation (n − 1), the mean alone of a single value, – of none."""
    if not values:
        return "–"
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def gap_closed(
    name: str,
    figures: Mapping[str, Sequence[Mapping[str, float]]],
    base: str | None = None,
    figure: str = "linear",
    oracle: str | None = None,
) -> float | None:
    """(method − base) / (oracle − base), seeds averaged; None for the base, and where the oracle
    (default: SupCon) is missing or not above the base. `figures`: row → those of each run."""
    low, high = base_of(name, figures, base), oracle or oracle_of(name, figures, base, ORACLES[:1])
    if low is None or high is None:
        return None
    values = [[run[figure] for run in figures[row] if figure in run] for row in (name, low, high)]
    if not all(values):
        return None
    method, bottom, top = (statistics.mean(each) for each in values)
    return (method - bottom) / (top - bottom) if top > bottom else None


def limited(
    data: Path,
    limit: int | None,
    out: Path,
    held_out: float = 0,
    by: str = "y_train",
    coarser: Sequence[str | list[int]] = (),
) -> Path:
    """The array file with `held_out` of the training images in the place of the test images: every
    so many-th group of `by`, or of each class every so many-th image; then cut to its first `limit`
    training images. `coarser`: replaces the classes, step by step, by those that an array of the
    file, or a list, has for each."""
    if limit is None and not held_out and not coarser:
        return data
    parts_of_name = [str(limit)] * bool(limit) + ["held-out"] * bool(held_out)
    parts_of_name += [f"coarser-{len(coarser)}"] * bool(coarser)
    cut = out / f"{'-'.join([data.stem, *parts_of_name])}.npz"
    if not cut.exists():
        with np.load(data) as arrays:
            kept = dict(arrays.items())
        for step in coarser:
            coarse = kept[step] if isinstance(step, str) else np.array(step)
            kept |= {name: coarse[kept[name]] for name in ("y_train", "y_test")}
            kept.pop("classes", None)  # the names of the finer ones
        parts = {name: array for name, array in kept.items() if name.endswith("_train")}
        if held_out:
            groups, every = kept[by], round(1 / held_out)
            turn = (
                groups
                if by != "y_train"
                else np.array([(groups[:place] == own).sum() for place, own in enumerate(groups)])
            )
            apart = turn % every == 0
            kept |= {name.replace("_train", "_test"): array[apart] for name, array in parts.items()}
            parts = {name: array[~apart] for name, array in parts.items()}
        kept |= {name: array[:limit] for name, array in parts.items()}
        out.mkdir(parents=True, exist_ok=True)
        np.savez(cut.with_suffix(".partial.npz"), **kept)
        cut.with_suffix(".partial.npz").replace(cut)
    return cut


def forked(target: Callable[..., object], *given: object) -> float:
    """Calls the function in a process of its own: a fork, which has the imports behind it. Returns
    the CPU seconds it took, those of its own processes included."""
    import kinfolk.evaluation.protocols
    import kinfolk.training.train  # noqa: F401  the heavy ones

    process, before = (
        multiprocessing.get_context("fork").Process(target=target, args=given),
        _cpu_of_children(),
    )
    process.start()
    process.join()
    if process.exitcode:
        raise subprocess.CalledProcessError(process.exitcode, [str(word) for word in given])
    return _cpu_of_children() - before


def _cpu_of_children() -> float:
    """User and system seconds of the processes that have ended, which other work on the machine
    hardly changes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def command(*words: object) -> float:
    """`kinfolk WORDS`; the CPU seconds it took."""
    from kinfolk.cli import main

    return forked(main, [str(word) for word in words])


def probed(folder: Path, data: Path, strengths: dict[float, float], draws: int = 3) -> None:
    """kNN and linear probes of a run, written where `kinfolk eval` writes. `strengths`: percent of
    the labels → ℓ2 penalty."""
    from kinfolk.embedding import divide, take_parts
    from kinfolk.evaluation.gradient_training import label_subset
    from kinfolk.evaluation.probes import linear_probe
    from kinfolk.evaluation.protocols import run_knn, write_result
    from kinfolk.training.load_run import open_run

    opened = open_run(folder)
    images = opened.data(str(data))
    parts = take_parts(images, opened.features(images))
    write_result(folder, "knn", run_knn(parts, k=20, temperature=0.1))
    used, found = divide(parts, 0, "the linear probe"), []
    for percent, strength in strengths.items():
        drawn = [
            label_subset(used.train_y, percent / 100, draw)
            for draw in range(1 if percent == 100 else draws)
        ]
        each = [
            linear_probe(
                used.train_x[some],
                used.train_y[some],
                used.test_x,
                used.test_y,
                strengths=[strength],
            )
            for some in drawn
        ]
        found.append(
            {
                "fraction": percent / 100,
                "strength": strength,
                "accuracy": statistics.fmean(one.accuracy for one in each),
            }
        )
    write_result(folder, "linear", {**found[0], "measured_on": used.measured_on})
    write_result(
        folder, "semi", {"fractions": found[1:], "draws": draws, "measured_on": used.measured_on}
    )


def settings(tree: dict[str, Any]) -> list[str]:
    """`{"detector": {"alpha": 0.1}}` as `detector.alpha=0.1`."""
    return [f"{key}={json.dumps(value)}" for key, value in flat(tree).items()]


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """`change` laid over `base`, section by section."""
    both = dict(base)
    for key, value in change.items():
        both[key] = (
            merged(both[key], value)
            if isinstance(value, dict) and isinstance(both.get(key), dict)
            else value
        )
    return both


def run(
    folder: Path,
    recipe: str,
    name: str,
    change: dict[str, Any],
    data: Path,
    seed: int,
    measure: list[str],
    probes: dict[float, float] | None = None,
    tests: Sequence[Path] = (),
    report: bool = False,
) -> Record:
    """Trains and evaluates where that is not done yet; what the run says of itself. `measure`:
    protocols, then more of `kinfolk eval`, on each of `tests`, or on the data of the training; with
    `probes` see `probed` instead."""
    results, (protocols, *more) = folder / "eval", measure
    names = protocols.split(",")
    if not is_measured(results / f"{names[-1]}.json", len(tests)):
        method, recipe = method_of(name, change), str(change.pop("recipe", recipe))
        sets = [part for text in settings(change) for part in ("--set", text)]
        how = (
            ["--resume"]
            if (folder / "config.yaml").exists()
            else ["--recipe", recipe, "--method", method, *sets]
        )
        print(f"· {folder.name}", flush=True)
        seconds = command(
            "train", "--data", data, "--out", folder, "--seed", seed, "--no-report", *how
        )
        if "--resume" not in how:
            (folder / CPU_SECONDS).write_text(f"{seconds:.2f}\n", encoding="utf-8")
        if probes is None:
            for each in tests or [data]:
                command("eval", folder, "--protocol", protocols, "--data", each, *more)
        else:
            forked(probed, folder, data, probes)
        if report:
            command("report", folder)
    return read_record(folder)


def is_measured(result: Path, num_tests: int) -> bool:
    """Whether the result of a protocol is there; of transfer, for all data sets."""
    if not result.exists():
        return False
    sets = json.loads(result.read_text(encoding="utf-8")).get("sets")
    return sets is None or len(sets) >= num_tests


def settings_of(study: dict[str, Any], method: str, dataset: str | None = None) -> dict[str, Any]:
    """What the document sets for all, for the data set, and for the method."""
    of_data = {} if dataset is None else study["datasets"][dataset].get("settings", {})
    return merged(merged(study.get("settings", {}), of_data), study["methods"][method] or {})


def run_queue(
    study: dict[str, Any],
    data_dir: Path,
    out: Path,
    results: Results,
    todo: list[Job],
    hours: float | None,
    beside: int = 1,
) -> None:
    """Works through the jobs that have no record yet. A run that fails is named and left for the
    next time; the queue goes on."""
    made_with, failed = version(), list[str]()
    for job, outcome in _outcomes(study, data_dir, out, todo, hours, beside):
        if isinstance(outcome, subprocess.CalledProcessError):
            failed.append(f"{job.dataset} {job.method} {job.seed} (exit {outcome.returncode})")
        else:
            used = out / job.folder / CPU_SECONDS
            results.add(
                job,
                figures_of(outcome),
                outcome.epochs,
                made_with,
                float(used.read_text()) if used.exists() else None,
            )
    if failed:
        raise SystemExit("failed: " + "; ".join(failed))


Outcome = Record | subprocess.CalledProcessError


def _outcomes(
    study: dict[str, Any],
    data_dir: Path,
    out: Path,
    todo: list[Job],
    hours: float | None,
    beside: int,
) -> Iterator[tuple[Job, Outcome]]:
    """Each job with what its run says of itself, or why there is none, as they finish."""
    began = time.monotonic()

    def late() -> bool:
        return hours is not None and time.monotonic() - began > 3600 * hours

    if beside == 1:
        yield from (
            (job, _outcome(*_prepared(study, data_dir, out, job))) for job in todo if not late()
        )
        return
    waiting, running = list(reversed(todo)), dict[Future[Outcome], Job]()
    with ProcessPoolExecutor(beside, multiprocessing.get_context("fork")) as pool:
        while running or (waiting and not late()):
            while waiting and len(running) < beside and not late():
                job = waiting.pop()
                running[pool.submit(_outcome, *_prepared(study, data_dir, out, job))] = job
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(done), done.result()


def _prepared(study: dict[str, Any], data_dir: Path, out: Path, job: Job) -> tuple[Any, ...]:
    """The arguments of `run`; the files it needs are there."""
    protocols, *more = str(
        study.get("protocol", "knn,linear,semi" if "probes" in study else "knn,linear")
    ).split()
    described = study["datasets"][job.dataset]
    more_of_data = {
        key: described[key] for key in ("held_out", "by", "coarser") if key in described
    }
    data = limited(data_dir / described["file"], described.get("limit"), out, **more_of_data)
    change = settings_of(study, job.method, job.dataset)
    for key, name in change.pop("files", {}).items():
        change = merged(
            change, in_section(key, str(data_dir / described["files"][name].format(seed=job.seed)))
        )
    if (labels := change.pop("labels", None)) is not None:
        change = merged(
            change, {"detector": {"labels_file": str(labels_file(labels, data, out, job.seed))}}
        )
    print(f"{job.stage}: {job.dataset} {job.method}, seed {job.seed}", flush=True)
    return (
        out / job.folder,
        study["recipe"],
        job.method,
        change,
        data,
        job.seed,
        [protocols, *more],
        study.get("probes"),
    )


def _outcome(*prepared: Any) -> Outcome:
    try:
        return run(*prepared)
    except subprocess.CalledProcessError as error:
        return error


def in_section(key: str, value: str) -> dict[str, Any]:
    """`{"model": {"init": value}}` for `model.init`; a name without a section is one of the
    detector."""
    section, _, name = key.rpartition(".")
    return {section or "detector": {name: value}}


def labels_file(labels: str | dict[str, float], data: Path, out: Path, seed: int) -> Path:
    """A file of the labels that the oracle is to go by: an array of the data file, or its classes
    corrupted."""
    name = (
        labels
        if isinstance(labels, str)
        else "-".join(f"{key}{value:g}" for key, value in labels.items()) + f"-{seed}"
    )
    path = out / f"{data.stem}-{name}.npy"
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        with np.load(data) as arrays:
            made = (
                arrays[labels]
                if isinstance(labels, str)
                else corrupted(arrays["y_train"], **labels, seed=seed)
            )
        np.save(path.with_suffix(".partial.npy"), made.astype(np.int64))
        path.with_suffix(".partial.npy").replace(path)
    return path


def method_of(name: str, change: dict[str, Any]) -> str:
    """A study may name the same method twice, with another setting in brackets: `simclr+glofnd
    (alpha 0.01)`."""
    return str(change.pop("method", name.partition(" ")[0]))


def table(figures: dict[str, list[dict[str, float]]], base: str | None = None) -> str:
    """Markdown."""
    clusters = [
        key for key in CLUSTERS if any(key in one for runs in figures.values() for one in runs)
    ]
    header = [
        "method",
        "kNN",
        "linear",
        "against its base",
        "p (linear)",
        "gap closed",
        "precision",
        "recall",
        "F1",
        "flagged",
    ]
    parts = list(
        dict.fromkeys(
            key for runs in figures.values() for one in runs for key in one if key.startswith(PARTS)
        )
    )
    header += [*(CLUSTERS[key] for key in clusters), *parts, "s / epoch"]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for name, runs in figures.items():
        row = base_of(name, figures, base)
        column = {
            key: [one[key] for one in runs if key in one]
            for key in (*COLUMNS, *clusters, *parts, "seconds")
        }
        other = {
            key: [] if row is None else [one[key] for one in figures[row] if key in one]
            for key in ("knn", "linear")
        }
        against, closed = "–", gap_closed(name, figures, base)
        if row is not None:
            known = [key for key in other if column[key] and other[key]]
            against = (
                " / ".join(
                    f"{statistics.mean(column[key]) - statistics.mean(other[key]):+.1f}"
                    for key in known
                )
                or "–"
            )
        p = None if row is None else p_value(column["linear"], other["linear"])
        shares = [
            "–" if p is None else f"{p:.3f}",
            "–" if closed is None else f"{100 * closed:.0f} %",
        ]
        cells = [format_spread(column["knn"]), format_spread(column["linear"]), against, *shares]
        cells += [
            format_spread(column[key]) for key in (*COLUMNS[2:], *clusters, *parts, "seconds")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def recall_table(figures: dict[str, list[dict[str, float]]], base: str | None = None) -> str:
    """Markdown."""
    header = ["method", *RECALLS, "mean", "against its base", "flagged", "s / epoch"]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for name, runs in figures.items():
        row = base_of(name, figures, base)
        means = [
            statistics.mean(one["retrieval"] for one in figures[each])
            for each in (name, row)
            if each is not None
        ]
        gain = None if row is None else means[0] - means[1]
        column = {
            key: format_spread([one[key] for one in runs if key in one])
            for key in (*RECALLS, "retrieval", "flagged", "seconds")
        }
        flagged = (
            "–"
            if "flagged" not in runs[0]
            else f"{statistics.mean(one['flagged'] for one in runs):.2f}"
        )
        cells = [
            *(column[key] for key in (*RECALLS, "retrieval")),
            "–" if gain is None else f"{gain:+.1f}",
            flagged,
            column["seconds"],
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path)
    parser.add_argument(
        "--data", type=Path, help="array file with x_train, y_train, x_test, y_test; or a table"
    )
    parser.add_argument(
        "--test",
        type=Path,
        nargs="+",
        default=[],
        help="what to measure on; that of --data unless given",
    )
    parser.add_argument(
        "--limit", type=int, help="only the first training images, of an array file"
    )
    parser.add_argument(
        "--data-dir", type=Path, help="folder of the array files of a document with `datasets`"
    )
    parser.add_argument("--stage", nargs="+", help="only these stages of the document")
    parser.add_argument("--hours", type=float, help="start no further run after that time")
    parser.add_argument("--beside", type=int, default=1, help="runs at a time")
    parser.add_argument(
        "--list", action="store_true", help="show what is done and what is to do, and run nothing"
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="file of the results; benchmarks/results/STUDY.json unless given",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", help="only these methods of the study")
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    options = parser.parse_args()
    study = yaml.safe_load(options.study.read_text(encoding="utf-8"))
    if unknown := [name for name in options.only or [] if name not in study["methods"]]:
        raise SystemExit(
            f"--only names {unknown[0]!r}, which is not among the methods of the study:"
            f" {', '.join(study['methods'])}"
        )
    if "stages" in study:
        return queue(options, study)
    if options.data is None:
        parser.error("--data is needed")
    out = options.out / options.study.stem / f"{options.data.stem}-{options.limit or 'all'}"
    data = limited(options.data, options.limit, out)
    measure = str(study.get("protocol", "knn,linear")).split()
    chosen = [name for name in study["methods"] if options.only is None or name in options.only]
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
    for seed in options.seeds:
        for name in chosen:
            folder = out / f"{folder_name(name)}-{seed}"
            more = {"tests": options.test, "report": study.get("report", False)}
            record = run(
                folder, study["recipe"], name, settings_of(study, name), data, seed, measure, **more
            )
            figures[name].append(figures_of(record))
    if "curves" in study:
        curves.drawn(curves.read(out), study["curves"]).write_html(out / "curves.html")
    text = (recall_table if measure[0] == "retrieval" else table)(figures, study.get("base"))
    (out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(
        f"\n{options.study.stem}: {data.name}, recipe {study['recipe']}, seeds {options.seeds};"
        f" percent\n\n{text}"
    )


def queue(options: argparse.Namespace, study: dict[str, Any]) -> None:
    """The runs of a document with stages, then a table for each data set."""
    results = Results(
        options.results or Path(__file__).parent / "results" / f"{options.study.stem}.json"
    )
    wanted = [
        job
        for job in jobs(study, options.stage)
        if options.only is None or job.method in options.only
    ]
    todo = [job for job in wanted if job not in results]
    if options.list:
        for job in wanted:
            print(
                f"{'done ' if job in results else 'to do'}  {job.stage}: {job.dataset}"
                f" {job.method}, seed {job.seed}"
            )
    elif options.data_dir is None:
        raise SystemExit(
            "--data-dir is needed: the folder of the array files that the document names"
        )
    else:
        run_queue(
            study,
            options.data_dir,
            options.out / options.study.stem,
            results,
            todo,
            options.hours,
            options.beside,
        )
    for dataset in study["datasets"]:
        if rows := results.figures(dataset):
            print(f"\n{dataset}; percent\n\n{table(rows, study.get('base'))}")


if __name__ == "__main__":
    main()
