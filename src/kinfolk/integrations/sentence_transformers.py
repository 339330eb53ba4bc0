"""Losses of two towers in a `SentenceTransformerTrainer` of sentence-transformers.

    dataset = add_ids(dataset)                      # columns anchor, positive[, negatives …]
    loss = KinfolkLoss(model, kf.CLIPLoss(temperature=0.05, detector=kf.PositiveMargin()))
    trainer = SentenceTransformerTrainer(model, args, train_dataset=dataset, loss=loss,
                                         callbacks=[KinfolkCallback(loss)])

Dimension key: B batch, K explicit negatives of each pair, T tokens, N samples.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from kinfolk import distributed
from kinfolk.data.labels import linked_rows
from kinfolk.detectors.base import Detector
from kinfolk.errors import KinfolkError, require, require_at_least
from kinfolk.files import first_line
from kinfolk.objectives import BimodalLoss, CLIPLoss, SigLIPLoss

if TYPE_CHECKING:
    from transformers import TrainerCallback
else:
    try:
        from transformers import TrainerCallback
    except ImportError as error:  # pragma: no cover
        raise ImportError(
            "kinfolk.integrations.sentence_transformers needs: pip install '.[sentence]' in a clone"
        ) from error

LABEL_COLUMNS = ("label", "labels", "score", "scores")  # that the trainer takes for labels
_DATASET = "a datasets.Dataset of at least one row, which an IterableDataset or a dict is not"
Features = Mapping[str, Any]  # the tokens of one column of the batch
TwoTowerLoss = BimodalLoss[Any] | SigLIPLoss


def add_ids(dataset: Any, *, ids: str | None = None, known_by: str | Sequence[str] = ()) -> Any:
    """The data set with a column `label` of sample ids and groups, which `KinfolkLoss` reads.

    All other columns must be texts in the order anchor, positive[, negative, …]. Rows with an equal
    anchor, positive or value of `known_by`, also through other rows, form a group of known
    positives. An explicit negative that is the positive of a row has its id and group; others have
    ids from N on, and the group of a row of which they are the anchor.

    Args:
        dataset: a `datasets.Dataset`.
        ids: a column of ids, which is removed: integers, or values of which equal ones have one id.
            None: the row's number.
        known_by: columns such as a document's name, removed too; "" and None link nothing.
    """
    sized = hasattr(dataset, "__len__") and isinstance(getattr(dataset, "column_names", None), list)
    require(sized and len(dataset) > 0, "dataset", type(dataset).__name__, _DATASET)
    keys = [known_by] if isinstance(known_by, str) else list(known_by)
    removed = keys if ids is None else [*keys, ids]
    names: list[str] = list(dataset.column_names)
    for name in removed:
        if name not in names:
            raise ValueError(f"there is no column {name!r} in the data set ({', '.join(names)})")
    texts = [name for name in names if name not in removed]
    if taken := [name for name in texts if name in LABEL_COLUMNS]:
        raise ValueError(
            f"the trainer takes the column {taken[0]!r} for labels: remove it, or name it as `ids`"
            " or in `known_by`"
        )
    require(len(texts) >= 2, "dataset", names, "of two or more columns of texts")
    columns = [_texts_of(dataset, name) for name in texts]
    id_N = list(range(len(dataset))) if ids is None else _numbers(dataset[ids])
    group_N = _groups(id_N, [*(dataset[key] for key in keys), *columns[:2]])
    numbers = [id_N, group_N, *_negatives(columns, id_N, group_N)]
    rows = [list(row) for row in zip(*numbers, strict=True)]
    return dataset.remove_columns(removed).add_column("label", rows)


def num_ids(dataset: Any) -> int:
    """`num_samples` of detectors and losses for a data set from `add_ids`."""
    negatives = (len(dataset[0]["label"]) - 2) // 2
    return 1 + max(int(max(row[0], *row[2 : 2 + negatives], 0)) for row in dataset["label"])


def _numbers(values: Sequence[Any]) -> list[int]:
    if all(type(value) is int and value >= 0 for value in values):
        return list(values)
    number: dict[Any, int] = {}
    return [number.setdefault(value, len(number)) for value in values]


def _texts_of(dataset: Any, name: str) -> list[str]:
    texts = list(dataset[name])
    for row, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(
                f"row {row} of the column {name!r} is {text!r}, not a text: remove the row, or the"
                " column if it has no texts"
            )
    return texts


def _groups(ids: list[int], columns: Iterable[Sequence[Any]]) -> list[int]:
    links = [[() if value in (None, "") else (value,) for value in each] for each in columns]
    roots: list[int] = linked_rows(len(ids), ((number,) for number in ids), *links).tolist()
    return roots


def _negatives(columns: list[list[str]], ids: list[int], groups: list[int]) -> list[list[int]]:
    """Ids of each column of explicit negatives, then their groups."""
    anchors, positives, *negatives = columns
    known = dict(zip(positives, zip(ids, groups, strict=True), strict=True))
    group_of, new_ids = dict(zip(anchors, groups, strict=True)), itertools.count(max(ids) + 1)
    found = [
        [
            known.get(text) or known.setdefault(text, (next(new_ids), group_of.get(text, -1)))
            for text in column
        ]
        for column in negatives
    ]
    return [[entry[part] for entry in column] for part in (0, 1) for column in found]


class KinfolkLoss(nn.Module):
    """A loss of two towers, which here are one encoder, for `SentenceTransformerTrainer`.

    Anchors are contrasted with the positives of the batch and all explicit negatives. Detectors and
    losses with state per sample need `add_ids`; without it, only equal positive texts are known
    positives. In evaluation mode there is no detector.

    Args:
        model: the SentenceTransformer.
        loss: `kf.CLIPLoss`, `kf.SigLIPLoss`, `kf.BimodalSogCLRLoss` or `kf.FastCLIPLoss`.
        both_directions: whether positives are also contrasted with anchors.
        own_negatives_only: an explicit negative counts for the anchor of its row only.
        in_batch_negatives: False: only explicit negatives, for anchors alone.
        mini_batch_size: texts encoded at a time, and again for the gradient (GradCache, Gao et al.,
            RepL4NLP 2021): less memory, a third more time. None: all.
        known_positives: whether rows of one group, and equal texts, are no negatives.

    Relations: with `kf.CLIPLoss(temperature=0.05, learnable=False)`, one direction and
    `known_positives=False` it equals `MultipleNegativesRankingLoss` with its default scale of 20.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: TwoTowerLoss,
        *,
        both_directions: bool = True,
        own_negatives_only: bool = False,
        in_batch_negatives: bool = True,
        mini_batch_size: int | None = None,
        known_positives: bool = True,
    ) -> None:
        super().__init__()
        two_towers = isinstance(loss, BimodalLoss | SigLIPLoss)
        require(two_towers, "loss", loss, "a loss of two towers, such as kf.CLIPLoss()")
        require_at_least(1, mini_batch_size=mini_batch_size)
        self.model, self.loss = model, loss
        self.both_directions = both_directions and in_batch_negatives
        self.negatives = {"own_only": own_negatives_only, "in_batch": in_batch_negatives}
        self.mini_batch_size, self.known_positives = mini_batch_size, known_positives
        self.in_trainer: bool | None = None  # None: there is no callback so far

    def forward(
        self, sentence_features: Iterable[Features], labels: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        """`labels`: (B, 2 + 2K), the column of `add_ids`. The loss has metrics if there is a
        `KinfolkCallback`."""
        columns = list(sentence_features)
        training = self._inner.training
        self.loss.train(training)  # the trainer switches the model only
        loss_fn = self.loss if training else _without_detector(self.loss)
        given = self._ids(columns, labels, loss_fn)
        anchors, positives, *negatives = (
            self._embed(column, not number) for number, column in enumerate(columns)
        )
        if negatives:
            given |= {"negatives": torch.stack(negatives, 1)}
        given |= self.negatives
        loss: Tensor
        if self.both_directions or isinstance(loss_fn, SigLIPLoss):
            loss = loss_fn(anchors, positives, **given)
        else:
            one, learned = loss_fn.image, loss_fn.learned
            known = given.pop("ids"), given.pop("group_ids")
            pairs, _ = loss_fn.pairs_of(anchors, positives, *known, one, **given)
            loss = one.on(pairs, None if learned is None else learned())
        if not training:
            return loss
        if self.in_trainer is None and (self.loss.state_dict() or self.detectors):
            warnings.warn("add callbacks=[KinfolkCallback(loss)] to the trainer", stacklevel=2)
            self.in_trainer = False
        metrics = self.metrics if self.in_trainer else {}
        return Logged(loss, metrics) if metrics else loss  # the trainer fails on an empty one

    @property
    def metrics(self) -> dict[str, Tensor]:
        objectives = self.loss.objectives[: None if self.both_directions else 1]
        counts = torch.stack([each.stats.counts for each in objectives]).sum(0)
        flagged = counts[1] / counts[0].clamp(min=1)  # a tensor: the host does not wait
        found = {"flagged": flagged} if self.detectors else {}
        learned = self.loss.learned
        if learned is not None:
            found["temperature"] = torch.exp(-learned.logit_scale.detach())
        return found

    @property
    def detectors(self) -> tuple[Detector, ...]:
        found = (each.detector for each in self.loss.objectives)
        return tuple(each for each in found if isinstance(each, Detector))

    def _ids(
        self, columns: list[Features], labels: Tensor | None, loss_fn: TwoTowerLoss
    ) -> dict[str, Any]:
        number, known = len(columns) - 2, self.known_positives
        found: dict[str, Any] = {"ids": None, "group_ids": None}
        if labels is None:
            if any(each.looks_up for each in loss_fn.objectives):
                raise ValueError(
                    "the loss looks samples up: train on the data set that add_ids(dataset) returns"
                )
            if known:
                groups = torch.stack([_text_keys(column) for column in columns[1:]], 1)
                found |= {"group_ids": groups[:, 0], "negative_group_ids": groups[:, 1:]}
        else:
            fits = labels.ndim == 2 and labels.shape[1] == 2 + 2 * number
            must = f"the column that add_ids(dataset) adds to {len(columns)} columns of texts"
            right = fits and not labels.is_floating_point()
            require(right, "labels", f"{labels.dtype}, shape {tuple(labels.shape)}", must)
            found |= {"ids": labels[:, 0], "negative_ids": labels[:, 2 : 2 + number]}
            if known:
                found |= {"group_ids": labels[:, 1], "negative_group_ids": labels[:, 2 + number :]}
        return {name: x for name, x in found.items() if number or not name.startswith("negative")}

    @property
    def _inner(self) -> nn.Module:
        model = self.model
        return model.module if isinstance(model, DistributedDataParallel) else model

    def _embed(self, features: Features, first: bool) -> Tensor:
        if self.mini_batch_size is None:
            return self._encode(features, first)
        found, encode = list[Tensor](), self._encode
        if torch.is_grad_enabled():
            encode = partial(checkpoint, self._encode, use_reentrant=False)
        for chunk in self._chunks(features, self.mini_batch_size):
            found.append(encode(chunk, first and not found))
        return torch.cat(found)

    def _chunks(self, features: Features, step: int) -> Iterator[dict[str, Any]]:
        mask = features.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            raise ValueError("`mini_batch_size` needs a model with padded tokens (attention_mask)")
        for first in range(0, len(mask), step):
            yield {
                name: value[first : first + step]
                if isinstance(value, Tensor) and value.shape[:1] == mask.shape[:1]
                else value
                for name, value in features.items()
            }

    def _encode(self, features: Features, wrapped: bool) -> Tensor:
        """DistributedDataParallel is called once in a step: other calls may differ in number
        between ranks."""
        recomputed = torch._C._current_graph_task_id() != -1
        wrapped = wrapped and self._inner.training and not recomputed
        model = self.model if wrapped else self._inner
        found: Tensor = model(dict(features))["sentence_embedding"]
        return found


def _without_detector(loss: TwoTowerLoss) -> TwoTowerLoss:
    given: dict[str, Any] = {"learnable": False, "gather": loss.gather}
    t = loss.current_temperature
    if isinstance(loss, SigLIPLoss):
        given |= {"temperature": t, "min_temperature": loss.min_temperature}
        return SigLIPLoss(**given, bias=float(cast(Tensor, loss.bias))).eval()
    plain = CLIPLoss(**given).eval()
    for each in plain.objectives:
        each.temperature = t  # that of other losses may be above 1
    return plain


class Logged(dict[str, Tensor]):
    """A loss with metrics. A trainer adds up `values()` and logs the mean of `items()`."""

    def __init__(self, loss: Tensor, metrics: Mapping[str, Tensor]) -> None:
        super().__init__(metrics)
        self.loss = loss

    def values(self) -> list[Tensor]:  # type: ignore[override]
        return [self.loss]

    def __mul__(self, weight: float) -> Tensor:
        """For losses around this one, such as `MatryoshkaLoss`, which then log no metrics."""
        return self.loss * weight

    __rmul__ = __mul__


def _text_keys(features: Features) -> Tensor:
    """(B,) a stable number for each text, wherever the padding is."""
    tokens, mask = features.get("input_ids"), features.get("attention_mask")
    if not isinstance(tokens, Tensor) or not isinstance(mask, Tensor) or mask.shape != tokens.shape:
        raise ValueError(
            "texts without padded tokens cannot be compared: use add_ids(dataset), or"
            " known_positives=False"
        )
    mask_BT = mask.to(torch.int64)
    # powers of an odd number modulo 2⁶⁴, by place without padding
    power_BT = torch.full_like(mask_BT, 0x5851F42D4C957F2D).where(mask_BT > 0, 1).cumprod(1)
    key_B = ((tokens + 1) * mask_BT * power_BT).sum(1)
    return (key_B ^ (key_B >> 29)) & ((1 << 63) - 1)


class KinfolkCallback(TrainerCallback):
    """Passes the epoch to a `KinfolkLoss`, refreshes its detectors, and saves its state in the
    checkpoints. Each loss needs a callback.

    `batch_size`: texts encoded together in a refresh.
    """

    def __init__(self, loss: KinfolkLoss, *, batch_size: int = 128) -> None:
        self.loss, self.batch_size = loss, batch_size
        self.refreshed, self.file = -1, "kinfolk_loss.safetensors"

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.loss.in_trainer, self.refreshed = True, -1
        # a trainer with a loss for each of several data sets has as many callbacks
        number = state.kinfolk_losses = getattr(state, "kinfolk_losses", 0) + 1
        self.file = f"kinfolk_loss{'' if number == 1 else f'_{number}'}.safetensors"
        if state.global_step > 0:
            self._load(_checkpoint_folder(args, state) / self.file)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.loss.in_trainer = False

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        epoch, epochs = int(state.epoch or 0), _num_epochs(state)
        self.loss.loss.set_progress(float(state.epoch or 0), epochs)
        due = [each for each in self.loss.detectors if each.due(epoch)]
        if due and epoch > self.refreshed:
            features = None
            if not all(each.collects for each in due):
                dataset = given["train_dataloader"].dataset
                features = self._features(given["model"], dataset, args.prompts)
            for each in due:
                each.set_loss_temperature(self.loss.loss.current_temperature)
                each.refresh(None if each.collects else features, epoch / epochs)
        self.refreshed = max(self.refreshed, epoch)

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.loss.loss.set_progress(float(state.epoch or 0), _num_epochs(state))

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        from safetensors.torch import save_file

        folder = _checkpoint_folder(args, state)
        if state.is_world_process_zero and folder.is_dir():
            state_dict = self.loss.loss.state_dict()
            tensors = {
                name: x.detach().cpu().clone().contiguous() for name, x in state_dict.items()
            }
            save_file(tensors, folder / self.file, {"refreshed": str(self.refreshed)})

    def _load(self, path: Path) -> None:
        from safetensors import safe_open

        if not path.is_file():
            raise KinfolkError(
                f"`{path}` does not exist, so the state of the loss cannot be resumed; resume from"
                " a checkpoint in the output folder"
            )
        try:
            with safe_open(path, "pt") as file:
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                self.refreshed = int(file.metadata()["refreshed"])
            self.loss.loss.load_state_dict(state)
        except Exception as error:  # a broken file, or the state of another loss
            raise KinfolkError(
                f"`{path}` is not the state of {self.loss.loss!r} ({first_line(error)})"
            ) from error

    @torch.no_grad()
    def _features(self, model: Any, dataset: Any, prompts: Any) -> Tensor:
        """(N, D) embeddings of anchors and explicit negatives by their ids."""
        texts, world = self._texts(dataset), distributed.world_size()
        rank = 0 if world == 1 else torch.distributed.get_rank()
        cuts = [len(texts) * each // world for each in range(world + 1)]
        was_training = model.training
        part = model.encode(
            texts[cuts[rank] : cuts[rank + 1]],
            batch_size=self.batch_size,
            prompt=prompts.get(dataset.column_names[0]) if isinstance(prompts, dict) else prompts,
            convert_to_tensor=True,
            normalize_embeddings=True,
            show_progress_bar=False,
        ).float()
        model.train(was_training)
        sizes = [end - start for start, end in itertools.pairwise(cuts)]
        return part.clone() if world == 1 else distributed.gather_rows(part, sizes)

    def _texts(self, dataset: Any) -> list[str]:
        if "label" not in getattr(dataset, "column_names", ()):
            raise KinfolkError(
                "a detector that clusters needs one data set with sample ids: train on"
                " add_ids(dataset)"
            )
        anchor, _, *negatives = (x for x in dataset.column_names if x not in LABEL_COLUMNS)
        sizes = [each.num_samples or 0 for each in self.loss.detectors]
        found: list[str | None] = [None] * max(num_ids(dataset), *sizes)
        for place, name in ((0, anchor), *enumerate(negatives, 2)):
            for row, text in zip(dataset["label"], dataset[name], strict=True):
                found[row[place]] = found[row[place]] or text
        if None in found:
            must = "`num_samples` of the detector must be num_ids(dataset)"
            raise KinfolkError(f"no row has the sample id {found.index(None)}: {must}")
        return [text for text in found if text is not None]


def _checkpoint_folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _num_epochs(state: Any) -> int:
    return max(1, math.ceil(float(state.num_train_epochs)))
