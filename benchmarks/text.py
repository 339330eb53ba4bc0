"""The contest on sentences: losses of sentence-transformers and ours, with detectors, on intents of
questions.

    # all runs that have no record yet; may be started twice
    python benchmarks/text.py run --data-root DATA --model FOLDER
    # the records as tables, also of a part of them
    python benchmarks/text.py table
    # durations, on a machine without other work
    python benchmarks/text.py time --data-root DATA --model FOLDER

`study_figures.py` writes the tables into docs/results.md, and the rows into its figure of gains.

The protocol is `text.yaml`. One JSON record per run in `results/text/`.

Dimension key: Q queries, N samples, D embedding.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import json
import os
import statistics
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
import yaml
from study_queue import version
from torch import Tensor, nn

import kinfolk as kf
from kinfolk.comparing.table import p_value

HERE = Path(__file__).parent
STUDY, RESULTS = HERE / "text.yaml", HERE / "results" / "text"
CHOOSING_SEED, SCREENING_EPOCHS, HELD_OUT, NEIGHBOURS, DEPTH = 100, 10, 0.2, 10, 200
METRICS = ("knn", "map", "recall@1")
Split = tuple[list[str], Tensor]
"""Texts and their (N,) labels."""
Records = Mapping[str, Mapping[int, Mapping[str, Any]]]
"""Method → seed → record."""


def read(path: Path, names: list[str]) -> Split:
    """The questions of a file, and the number of their intents in `names`, which grows."""
    texts, labels = list[str](), list[int]()
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["category"] not in names:
                names.append(row["category"])
            texts.append(row["text"])
            labels.append(names.index(row["category"]))
    return texts, torch.tensor(labels)


def keep_per_intent(train: Split, number: int | None, seed: int = 0) -> Split:
    """`number` questions of every intent (None: all), the same for every method and seed."""
    if number is None:
        return train
    texts, labels = train
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))
    kept = torch.cat(
        [order[labels[order] == label][:number] for label in range(int(labels.max()) + 1)]
    )
    kept = kept.sort().values
    return [texts[row] for row in kept.tolist()], labels[kept]


def split(train: Split, seed: int) -> tuple[Split, Split]:
    """A part to train on and one to choose settings by, a fifth of every intent."""
    texts, labels = train
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    wanted = {
        label: round(HELD_OUT * count)
        for label, count in enumerate(torch.bincount(labels).tolist())
    }
    held, fit = list[int](), list[int]()
    for row in order:
        label = int(labels[row])
        (held if wanted[label] > 0 else fit).append(row)
        wanted[label] -= 1
    return ([texts[i] for i in fit], labels[fit]), ([texts[i] for i in held], labels[held])


def draw_positives(labels: Tensor, seed: int) -> list[int]:
    """For every sample another one of its label."""
    generator = torch.Generator().manual_seed(seed)
    found = list[int]()
    for row, label in enumerate(labels.tolist()):
        same = (labels == label).nonzero().flatten()
        same = same[same != row] if len(same) > 1 else same
        found.append(int(same[torch.randint(len(same), (), generator=generator)]))
    return found


def encode(model: Any, texts: list[str]) -> Tensor:
    """(N, D) unit embeddings."""
    given = {"convert_to_tensor": True, "normalize_embeddings": True, "show_progress_bar": False}
    found: Tensor = model.encode(texts, batch_size=256, **given)
    return found.float().clone()


def measure(
    known_ND: Tensor, label_N: Tensor, asked_QD: Tensor, label_Q: Tensor
) -> dict[str, float]:
    """kNN accuracy among the known; mean average precision and recall@1 of the asked among each
    other."""
    near = (asked_QD @ known_ND.T).topk(min(NEIGHBOURS, len(known_ND)), dim=1)
    votes = torch.zeros(len(label_Q), int(label_N.max()) + 1)
    votes.scatter_add_(1, label_N[near.indices], near.values)
    similarity_QQ = (asked_QD @ asked_QD.T).fill_diagonal_(-2)
    others = similarity_QQ.topk(min(DEPTH, len(label_Q) - 1), dim=1).indices
    hits = (label_Q[others] == label_Q.unsqueeze(1)).float()
    precision = hits.cumsum(1) / torch.arange(1, hits.shape[1] + 1)
    possible = (torch.bincount(label_Q)[label_Q] - 1).clamp(1, hits.shape[1])
    found = (votes.argmax(1) == label_Q).float(), (precision * hits).sum(1) / possible, hits[:, 0]
    return {name: 100 * float(value.mean()) for name, value in zip(METRICS, found, strict=True)}


def make_detector(
    name: str, settings: Mapping[str, Any], model: Any, fit: Split, positives: list[int]
) -> kf.Detector:
    """A detector for pairs of the samples of `fit`."""
    number = len(fit[0])
    if name == "oracle":
        return kf.Oracle(fit[1])
    if name == "guide":  # the encoder as it is before training
        features = encode(model, fit[0])
        return kf.Guide(features, positives=features[positives], **settings)
    if name in ("glofnd", "ifnd"):
        kind: Any = {"glofnd": kf.GloFND, "ifnd": kf.IFND}[name]
        found: kf.Detector = kind(num_samples=number, **settings)
        return found
    return {"fnc": kf.FNC, "positive_margin": kf.PositiveMargin}[name](**settings)  # type: ignore[no-any-return]


def encode_by_length(model: Any, parts: int = 5) -> Any:
    """The model, which encodes the texts of a batch in `parts` of similar length: the same
    embeddings up to rounding, with less padding. Words are looked up once per batch, because every
    look-up costs a dense gradient of all words. All rows of the contest train with it."""
    plain, words = model.forward, model[0].auto_model.embeddings.word_embeddings
    tables = [words.weight]  # the last one: of the words of the batch
    words.forward = lambda ids: F.embedding(ids, tables[-1])

    def forward(features: dict[str, Any], **given: Any) -> dict[str, Any]:
        mask = features["attention_mask"]
        if len(mask) < 2 * parts:
            found: dict[str, Any] = plain(features, **given)
            return found
        features = {**features}
        used, features["input_ids"] = features["input_ids"].unique(return_inverse=True)
        tables.append(F.embedding(used, words.weight))
        lengths = mask.sum(1)
        order, embeddings = lengths.argsort(), list[Tensor]()
        for rows in order.chunk(parts):
            longest = int(lengths[rows].max())
            part = {
                name: value[rows, :longest] if getattr(value, "shape", 0) == mask.shape else value
                for name, value in features.items()
            }
            embeddings.append(plain(part, **given)["sentence_embedding"])
        tables.pop()
        return {**features, "sentence_embedding": torch.cat(embeddings)[order.argsort()]}

    model.forward = forward
    return model


class Adapter(nn.Module):
    """A residual perceptron on frozen embeddings, called as a sentence encoder is."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        last = nn.Linear(dim, dim)
        nn.init.zeros_(last.weight)
        self.body = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), last)

    def forward(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        embedding = features["embedding"]
        return {"sentence_embedding": embedding + self.body(embedding)}


def screen(
    embeddings: tuple[Tensor, Tensor],
    labels: tuple[Tensor, Tensor],
    method: Mapping[str, Any],
    study: Mapping[str, Any],
    seed: int,
) -> dict[str, float]:
    """The measures of an adapter that is trained on frozen embeddings, as the encoder would be, and
    evaluated on the held-out questions. GIST is screened as a guide with an absolute margin."""
    from datasets import Dataset

    from kinfolk.integrations.sentence_transformers import KinfolkLoss, add_ids

    torch.manual_seed(seed)
    fit_ND, held_QD = embeddings
    positives = draw_positives(labels[0], seed)
    settings, name = method["settings"], method.get("detector", "guide")
    if name == "guide":
        detector: kf.Detector = kf.Guide(fit_ND, positives=fit_ND[positives], **settings)
    else:
        detector = make_detector(name, settings, None, ([""] * len(fit_ND), labels[0]), positives)
    texts = {"anchor": list(range(len(fit_ND))), "positive": positives}
    label_N2 = torch.tensor(
        add_ids(Dataset.from_dict({k: [str(n) for n in v] for k, v in texts.items()}))["label"]
    )
    adapter = Adapter(fit_ND.shape[1])
    objective = kf.CLIPLoss(temperature=study["temperature"], learnable=False, detector=detector)
    loss_fn = KinfolkLoss(adapter, objective, both_directions=False)
    loss_fn.in_trainer = False
    optimizer = torch.optim.AdamW(adapter.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(SCREENING_EPOCHS):
        objective.set_progress(float(epoch), SCREENING_EPOCHS)
        if detector.due(epoch):
            with torch.no_grad():
                found = adapter({"embedding": fit_ND})["sentence_embedding"]
            detector.set_loss_temperature(objective.current_temperature)
            detector.refresh(found, epoch / SCREENING_EPOCHS)
        order = torch.randperm(len(fit_ND), generator=generator)
        for rows in torch.split(order, study["batch_size"])[:-1]:
            columns = [{"embedding": fit_ND[rows]}, {"embedding": fit_ND[positives][rows]}]
            loss = loss_fn(columns, label_N2[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        known, asked = (
            F.normalize(adapter({"embedding": each})["sentence_embedding"], dim=1)
            for each in (fit_ND, held_QD)
        )
    return measure(known, labels[0], asked, labels[1])


def train(
    load: Callable[[], Any],
    method: Mapping[str, Any],
    study: Mapping[str, Any],
    fit: Split,
    seed: int,
) -> tuple[Any, dict[str, float]]:
    """The trained model; seconds per epoch, and the share, precision and recall of what was flagged
    in the last epoch."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )
    from sentence_transformers.training_args import BatchSamplers

    from kinfolk.integrations.sentence_transformers import KinfolkCallback, KinfolkLoss, add_ids

    torch.manual_seed(seed)
    model = encode_by_length(load())
    if method.get("loss") == "none":
        return model, {}
    positives = draw_positives(fit[1], seed)
    dataset = Dataset.from_dict({"anchor": fit[0], "positive": [fit[0][row] for row in positives]})
    callbacks = list[Any]()
    if method.get("loss") == "mnrl":
        loss: Any = losses.MultipleNegativesRankingLoss(model, scale=1 / study["temperature"])
    elif method.get("loss") == "gist":
        settings = {
            "temperature": study["temperature"],
            "margin": method["settings"]["margin"],
            "margin_strategy": "absolute",
        }
        loss = losses.GISTEmbedLoss(model, encode_by_length(load()), **settings)
    else:
        name = method.get("detector")
        detector = (
            None if name is None else make_detector(name, method["settings"], model, fit, positives)
        )
        plain = {"temperature": study["temperature"], "learnable": False, "detector": detector}
        objective = kf.CLIPLoss(**plain, action=method.get("action", "eliminate"))
        objective.set_eval_labels(fit[1])
        loss, dataset = KinfolkLoss(model, objective, both_directions=False), add_ids(dataset)
        callbacks = [KinfolkCallback(loss)]
    sampler = (
        BatchSamplers.NO_DUPLICATES
        if method.get("sampler") == "no_duplicates"
        else BatchSamplers.BATCH_SAMPLER
    )
    with tempfile.TemporaryDirectory() as folder:
        args = SentenceTransformerTrainingArguments(
            output_dir=folder,
            num_train_epochs=study["epochs"],
            per_device_train_batch_size=study["batch_size"],
            learning_rate=study["learning_rate"],
            warmup_steps=round(
                study["warmup_ratio"] * study["epochs"] * (len(dataset) // study["batch_size"])
            ),
            bf16=study["bf16"],
            batch_sampler=sampler,
            dataloader_drop_last=True,
            seed=seed,
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to=[],
            logging_steps=10,
            disable_tqdm=True,
        )
        trainer = SentenceTransformerTrainer(
            model=model, args=args, train_dataset=dataset, loss=loss, callbacks=callbacks
        )
        start = time.perf_counter()
        trainer.train()
        found = {"seconds": (time.perf_counter() - start) / study["epochs"]}
    found |= (
        {"flagged": shares[-1]}
        if (shares := [e["flagged"] for e in trainer.state.log_history if "flagged" in e])
        else {}
    )
    if isinstance(loss, KinfolkLoss) and loss.detectors:
        stats = cast(Any, loss.loss).image.stats  # of the last step
        found |= {"precision": stats.precision, "recall": stats.recall}
    return model, found


def record_path(
    results: Path, stage: str, data: str, name: str, seed: int, settings: Mapping[str, Any]
) -> Path:
    shown = "".join(f" {key}={value}" for key, value in settings.items())
    return (
        results
        / data
        / f"{stage} {name}{shown} seed={seed}.json".replace(", ", "-").replace(" ", "_")
    )


def choices(method: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All settings of a method."""
    grid = method.get("grid", {})
    return [
        {**method.get("fixed", {}), **dict(zip(grid, values, strict=True))}
        for values in itertools.product(*grid.values())
    ]


def chosen(study: Mapping[str, Any], results: Path, data: str, name: str) -> dict[str, Any] | None:
    """The method with the settings of the best mAP while choosing; None while some are not
    measured."""
    method = study["methods"][name]
    if "best_of" in method:
        found = [(each, chosen(study, results, data, each)) for each in method["best_of"]]
        if any(each is None for _, each in found):
            return None
        best = max((each for _, each in found if each is not None), key=lambda each: each["map"])
        return {**best, "action": method["action"]}
    options = choices(method)
    if "grid" not in method:
        return {**method, "settings": options[0], "map": 0.0}
    scores = list[float]()
    for settings in options:
        path = record_path(results, "choose", data, name, CHOOSING_SEED, settings)
        if not path.is_file():
            return None
        scores.append(json.loads(path.read_text(encoding="utf-8"))["map"])
    best_at = max(range(len(scores)), key=scores.__getitem__)
    return {**method, "settings": options[best_at], "map": scores[best_at]}


def queue(
    study: Mapping[str, Any], results: Path, data: str
) -> Iterator[tuple[str, str, int, Callable[[], dict[str, Any] | None]]]:
    """Stage, method, seed, and the method with its settings: first all that choose settings, then
    all others, seed by seed."""
    for name, method in study["methods"].items():
        for settings in choices(method) if "grid" in method else ():
            yield (
                "choose",
                name,
                CHOOSING_SEED,
                lambda method=method, settings=settings: {**method, "settings": settings},  # type: ignore[misc]
            )
    for seed in study["seeds"]:
        for name in study["methods"]:
            yield "final", name, seed, lambda name=name: chosen(study, results, data, name)  # type: ignore[misc]


def claim(path: Path) -> bool:
    """Whether this process may make the record: nobody has it, or who had it is gone."""
    lock = path.with_suffix(".claim")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with lock.open("x", encoding="utf-8") as file:
            file.write(str(os.getpid()))
        return True
    except FileExistsError:
        text = lock.read_text(encoding="utf-8")
        if text.isdigit() and not Path(f"/proc/{text}").exists() and Path("/proc").exists():
            lock.write_text(str(os.getpid()), encoding="utf-8")
            return True
        return False


def run(
    study: Mapping[str, Any],
    root: Path,
    load: Callable[[], Any],
    results: Path,
    only: list[str] | None,
    most: int | None,
) -> int:
    """Makes the records that are missing; returns how many."""
    made = 0
    for data in study["data"]:
        names = list[str]()
        whole, test = (read(root / data / f"{part}.csv.gz", names) for part in ("train", "test"))
        whole = keep_per_intent(whole, study["per_intent"])
        frozen: tuple[Tensor, Tensor] | None = None
        for stage, name, seed, settled in queue(study, results, data):
            if (only and name not in only) or (most is not None and made >= most):
                continue
            method = settled()
            if method is None:
                print(
                    f"{data}, {name}: its settings are not chosen yet; start again later",
                    flush=True,
                )
                continue
            path = record_path(
                results, stage, data, name, seed, method["settings"] if stage == "choose" else {}
            )
            if path.is_file() or not claim(path):
                continue
            if stage == "choose":
                fit, held = split(whole, seed)
                if frozen is None:
                    frozen = encode(load(), fit[0]), encode(load(), held[0])
                found = screen(frozen, (fit[1], held[1]), method, study, seed)
            else:
                with torch.autocast("cpu", torch.bfloat16, enabled=study["bf16"]):
                    model, found = train(load, method, study, whole, seed)
                    known_ND, asked_QD = (encode(model, each[0]) for each in (whole, test))
                found |= measure(known_ND, whole[1], asked_QD, test[1])
            record = {
                "data": data,
                "stage": stage,
                "method": name,
                "seed": seed,
                "detector": method.get("detector"),
            }
            record |= {"settings": method["settings"], "version": version(), **found}
            path.write_text(json.dumps(record, indent=1), encoding="utf-8")
            path.with_suffix(".claim").unlink()
            made += 1
            print(json.dumps(record), flush=True)
    return made


def measure_times(
    study: Mapping[str, Any], root: Path, load: Callable[[], Any], results: Path, rounds: int
) -> None:
    """Seconds of an epoch of every method on eight batches of the first data set, in turn. To be
    run on a machine without other work."""
    data, names = study["data"][0], list[str]()
    texts, labels = read(root / data / "train.csv.gz", names)
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))
    few = order[: 8 * study["batch_size"]]
    fit = [texts[row] for row in few.tolist()], labels[few]
    found = list[dict[str, float]]()
    for number in range(rounds + 1):  # the first one warms up
        found.append({})
        for name in study["methods"]:
            method = chosen(study, results, data, name)
            if name == "frozen" or method is None or (number == 0 and len(found[0]) == 2):
                continue
            with torch.autocast("cpu", torch.bfloat16, enabled=study["bf16"]):
                _, measured = train(load, method, {**study, "epochs": 1}, fit, seed=0)
            found[-1][name] = measured["seconds"]
            print(number, name, f"{measured['seconds']:.1f} s", flush=True)
    record = {"data": data, "samples": len(few), "version": version(), "rounds": found[1:]}
    (results / "times.json").write_text(json.dumps(record, indent=1), encoding="utf-8")


def read_records(study: Mapping[str, Any], results: Path, data: str) -> Records:
    """Method → seed → record, in the order of the protocol. Methods without records are absent."""
    paths = {
        name: {seed: record_path(results, "final", data, name, seed, {}) for seed in study["seeds"]}
        for name in study["methods"]
    }
    found = {
        name: {
            seed: json.loads(path.read_text(encoding="utf-8"))
            for seed, path in of_name.items()
            if path.is_file()
        }
        for name, of_name in paths.items()
    }
    return {name: records for name, records in found.items() if records}


def tables(study: Mapping[str, Any], results: Path) -> dict[str, str]:
    """A table in Markdown and what the best row without labels gains, for each data set that has
    records. Differences are over the seeds that both rows have, with the p-value of the paired
    one-sided t-test."""
    found = {data: read_records(study, results, data) for data in study["data"]}
    times = read_times(results)
    return {
        data: f"{_table(study, rows, times)}\n\n{textwrap.fill(_summary(study, rows), 100)}"
        for data, rows in found.items()
        if rows
    }


def read_times(results: Path) -> dict[str, float]:
    """Method → median duration of an epoch, as a multiple of that of `mnrl` in the same round."""
    path = results / "times.json"
    if not path.is_file():
        return {}
    rounds = json.loads(path.read_text(encoding="utf-8"))["rounds"]
    return {
        name: statistics.median(each[name] / each["mnrl"] for each in rounds) for name in rounds[0]
    }


def _table(study: Mapping[str, Any], rows: Records, times: Mapping[str, float]) -> str:
    heads = ["", "kNN", "against plain", "against GIST", "mAP", "against plain", "against GIST"]
    heads += ["recall@1", "flagged, precision, recall", "chosen", "time", "seeds"]
    lines = [_line(heads), _line("---" for _ in heads)]
    for name, records in rows.items():
        cells, found = [name], list(records.values())
        for key in METRICS[:2]:
            cells += [_spread([r[key] for r in found])]
            cells += [_against(rows, name, base, key) for base in ("plain", "gist")]
        flags = [r for r in found if "flagged" in r]
        shown = [
            f"{statistics.fmean(values):.3f}"
            if (values := [r[k] for r in flags if k in r])
            else "–"
            for k in (("flagged", "precision", "recall") if flags else ())
        ]
        cells += [
            _spread([r["recall@1"] for r in found]),
            ", ".join(shown),
            _chosen(study["methods"][name], found[0]),
            f"{times[name]:.2f}" if name in times else "",
            f"{len(records)} of {len(study['seeds'])}",
        ]
        lines.append(_line(cells))
    return "\n".join(lines)


def _chosen(method: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """The settings that were chosen, and the detector of "best"."""
    settings = [
        f"{k} {v}" for k, v in record["settings"].items() if k not in method.get("fixed", {})
    ]
    best = [str(record["detector"])] if "best_of" in method else []
    return ", ".join((*best, *settings))


def _summary(study: Mapping[str, Any], rows: Records) -> str:
    """For each measure what the oracle gains by eliminating, and the best row without labels."""
    own = [name for name, method in study["methods"].items() if name in rows and _is_ours(method)]
    sentences = list[str]()
    for key, title in zip(METRICS[:2], ("kNN", "mAP"), strict=True):
        gains = {
            name: gain
            for name in own
            if (gain := _difference(rows, name, "plain", key)) is not None
        }
        bound = _difference(rows, "oracle", "plain", key)
        if not gains or bound is None:
            continue
        best = max(gains, key=gains.__getitem__)
        share = f", {gains[best] / bound:.0%} of that" if _is_above(rows, "oracle", key) else ""
        others = (
            f" and {_against(rows, best, 'gist', key)} against `gist`" if "gist" in rows else ""
        )
        sentences.append(
            f"{title}: `oracle` gains {_against(rows, 'oracle', 'plain', key)}, and `{best}`, the"
            f" best without labels, {_against(rows, best, 'plain', key)}{share}{others}"
            f" ({len(rows[best])} of {len(study['seeds'])} seeds)."
        )
    return " ".join(sentences) or "No row can be compared with `oracle` yet."


def _is_ours(method: Mapping[str, Any]) -> bool:
    return method.get("loss") is None and method.get("detector") != "oracle" and method != {}


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _difference(rows: Records, name: str, base: str, key: str) -> float | None:
    """Points of `name` above `base`, over the seeds that both have; None if there are none."""
    seeds = rows.get(name, {}).keys() & rows.get(base, {}).keys()
    if not seeds or name == base:
        return None
    return statistics.fmean(rows[name][seed][key] - rows[base][seed][key] for seed in seeds)


def _p(rows: Records, name: str, base: str, key: str) -> float | None:
    """The p-value of `name` being above `base`; None with fewer than two common seeds."""
    seeds = sorted(rows[name].keys() & rows[base].keys())
    ours, others = ([rows[row][seed][key] for seed in seeds] for row in (name, base))
    return p_value(ours, others)


def _is_above(rows: Records, name: str, key: str) -> bool:
    p = _p(rows, name, "plain", key)
    return p is not None and p < 0.05


def _against(rows: Records, name: str, base: str, key: str) -> str:
    difference = _difference(rows, name, base, key)
    if difference is None or name == "frozen":
        return ""
    p = _p(rows, name, base, key)
    shown = "" if p is None else " (p < 0.001)" if p < 0.001 else f" (p {p:.3f})"
    return f"{round(difference, 1) + 0.0:+.1f}".replace("-", "−") + shown  # no "−0.0"


def _spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.1f}" + (
        f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "table", "time"))
    parser.add_argument("--study", type=Path, default=STUDY)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--model", help="folder or name of the sentence encoder")
    parser.add_argument("--data", nargs="+", help="these data sets only")
    parser.add_argument("--only", nargs="+", help="these methods only")
    parser.add_argument("--most", type=int, help="ends after so many runs")
    given = parser.parse_args(arguments)
    study = yaml.safe_load(given.study.read_text(encoding="utf-8"))
    study["data"] = given.data or study["data"]
    if given.what == "table":
        for data, text in tables(study, given.results).items():
            print(f"\n**{data}**\n\n{text}")
        return
    if given.data_root is None or given.model is None:
        parser.error(f"{given.what} needs --data-root and --model")
    from sentence_transformers import SentenceTransformer

    warnings.simplefilter("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"hidden_dropout_prob": study["dropout"]}
    options["attention_probs_dropout_prob"] = study["dropout"]
    # PyTorch's fused attention on a CPU takes longer than the plain products for short texts
    attention = {"attn_implementation": "eager"}

    def load() -> Any:
        return SentenceTransformer(
            given.model, device=device, config_kwargs=options, model_kwargs=attention
        )

    if given.what == "time":
        measure_times(study, given.data_root, load, given.results, rounds=3)
    else:
        run(study, given.data_root, load, given.results, given.only, given.most)


if __name__ == "__main__":
    main()
