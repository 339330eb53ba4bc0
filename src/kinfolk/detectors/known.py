"""Kin that are known beforehand: by true labels, or as listed pairs.

Dimension key: R rows of a block, N data set, P pairs, K listed kin of a row.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kinfolk.detectors.base import Detector, register
from kinfolk.errors import (
    KinfolkError,
    UsageError,
    short,
    unescape_cell,
    utf8_key,
    warn,
)
from kinfolk.files import explain_read_errors, first_line
from kinfolk.pairs import Block, Kin, is_integer, same_key


@register("oracle", "true labels; attracted: Khosla et al., NeurIPS 2020", "labels")
class Oracle(Detector):
    """Kin are the candidates with the anchor's label.

    Attracted on NT-Xent, it is SupCon. Labels are data, so they are not in `state_dict()`.

    Args:
        labels: (N,) integers by sample id; below 0: unknown, never kin.
        labels_file: a .npy file of such integers, instead of `labels`.

    Example:
        >>> import torch, kinfolk as kf
        >>> oracle = kf.Oracle(torch.tensor([0, 1, 0]))
        >>> loss_fn = kf.NTXentLoss(temperature=0.1, detector=oracle, action="attract")
        >>> loss_fn(torch.eye(3), torch.eye(3), torch.arange(3)).isfinite().item()
        True
    """

    num_samples: int

    def __init__(
        self, labels: Tensor | None = None, *, labels_file: str | Path | None = None
    ) -> None:
        super().__init__()
        if labels_file is not None:
            labels = _read_labels(Path(labels_file), None if labels is None else len(labels))
        if labels is None:
            raise UsageError(
                "the oracle needs labels and the data has none; use labelled data,"
                " --labels-from-folders, or `labels_file`"
            )
        if labels.ndim != 1 or not is_integer(labels) or not len(labels):
            raise ValueError(
                f"`labels` (={labels.dtype}, shape {tuple(labels.shape)}) must be integers of the"
                " shape (num_samples,)"
            )
        self.num_samples = len(labels)
        self.labels: Tensor
        self.register_buffer("labels", labels.to(torch.int64), persistent=False)

    def find(self, block: Block) -> Kin:
        return Kin(same_key(self.labels[block.row_ids], self.labels[block.candidate_ids]))

    def silent_reason(self, first_epoch: int = 0) -> str | None:
        shared = bool((torch.bincount(self.labels[self.labels >= 0]) > 1).any())
        why = "no two samples have the same known label; use data with labels of classes"
        return None if shared else why


def _read_labels(path: Path, expected: int | None) -> Tensor:
    import numpy as np

    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(
            f"`labels_file` (={path}) must be a .npy file with an integer for each training sample"
            f" ({first_line(error)})"
        ) from error
    kind, shape = getattr(array, "dtype", None), getattr(array, "shape", ())
    if kind is None or kind.kind not in "iu" or len(shape) != 1 or expected not in (None, *shape):
        raise UsageError(
            f"`labels_file` (={path}, shape {shape}) must hold an integer for each of the"
            f" {expected or 'N'} training samples, in order"
        )
    return torch.from_numpy(array.astype(np.int64))


@register("known", "pairs found beforehand, as by `kinfolk audit`", "pairs (--known-kin FILE)")
class Known(Detector):
    """Kin are the listed pairs, regardless of the current embedding.

    Pairs are data, so they are not in `state_dict()`.

    Args:
        pairs: (P, 2) sample ids of anchor and kin; or a `.parquet` or `.csv` file with the columns
            `anchor` and `kin`, such as the `pairs.parquet` of an audit.
        symmetric: whether a pair counts in both directions.
        keys: (N,) names of the samples, which match the columns `anchor_key` and `kin_key` of a
            file; pairs of other samples are left out with a warning.

    Example:
        >>> import torch, kinfolk as kf
        >>> known = kf.Known(torch.tensor([[0, 2]]), num_samples=3)
        >>> loss_fn = kf.NTXentLoss(temperature=0.1, detector=known)
        >>> loss_fn(torch.eye(3), torch.eye(3), torch.arange(3)).isfinite().item()
        True
    """

    num_samples: int
    start_N: Tensor
    kin_P: Tensor

    def __init__(
        self,
        pairs: str | Path | Tensor,
        *,
        num_samples: int,
        symmetric: bool = True,
        keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.num_samples = num_samples
        name = "`pairs`" if isinstance(pairs, Tensor) else f"`{pairs}`"
        pairs_P2 = pairs if isinstance(pairs, Tensor) else read_known(pairs, keys, num_samples)
        if pairs_P2.ndim != 2 or pairs_P2.shape[1] != 2 or not is_integer(pairs_P2):
            raise ValueError(
                f"{name} (={pairs_P2.dtype}, shape {tuple(pairs_P2.shape)}) must be integers of the"
                " shape (pairs, 2)"
            )
        start_N, kin_P = _by_anchor(pairs_P2.to(torch.int64).cpu(), num_samples, symmetric, name)
        self.longest = int(start_N.diff().max())
        self.register_buffer("start_N", start_N, persistent=False)
        self.register_buffer("kin_P", kin_P, persistent=False)

    @torch.no_grad()
    def find(self, block: Block) -> Kin:
        if not self.longest:
            return Kin()
        ids_R = block.row_ids
        first_R1, end_R1 = self.start_N[ids_R].unsqueeze(1), self.start_N[ids_R + 1].unsqueeze(1)
        place_RK = first_R1 + torch.arange(self.longest, device=ids_R.device)
        last_RK = place_RK.clamp(max=len(self.kin_P) - 1)
        listed_RK = torch.where(place_RK < end_R1, self.kin_P[last_RK], -1)
        return Kin(which_are_listed(listed_RK, block.candidate_ids))

    def silent_reason(self, first_epoch: int = 0) -> str | None:
        why = "`pairs` lists no pair of two different samples; give the pairs of these samples"
        return None if len(self.kin_P) else why


def which_are_listed(ids_RK: Tensor, ids_C: Tensor) -> Tensor:
    """(R, C) whether the row lists the candidate's id; ids below 0 are none.

    Only the device knows the number of matches, so the listed ids are marked by their ranks among
    the candidates' ids, and each candidate reads its rank.
    """
    sorted_C, order_C = ids_C.sort()
    rank_C = torch.empty_like(order_C).scatter_(0, order_C, torch.searchsorted(sorted_C, sorted_C))
    rank_RK = torch.searchsorted(sorted_C, ids_RK).clamp(max=len(sorted_C) - 1)
    there_RK = (sorted_C[rank_RK] == ids_RK) & (ids_RK >= 0)
    marked_RC = there_RK.new_zeros(len(ids_RK), len(sorted_C) + 1)
    marked_RC.scatter_(1, torch.where(there_RK, rank_RK, len(sorted_C)), True)
    return marked_RC[:, rank_C]


def read_known(
    path: str | os.PathLike[str], keys: Sequence[str] | None = None, num_samples: int | None = None
) -> Tensor:
    """(P, 2) sample ids of anchor and kin in a table, matched by `keys` if both have them, else
    refused if it records an audit of another number of samples than `num_samples`."""
    path = Path(path)
    if not path.is_file():
        raise UsageError(
            f"there is no file `{path}` of known kin; give the pairs.parquet that `kinfolk audit`"
            " wrote"
        )
    import pyarrow as pa

    with explain_read_errors(f"`{path}`", "table of known kin"):
        if path.suffix.lower() == ".csv":
            import pyarrow.csv as tables

            table = tables.read_csv(path)
        else:
            import pyarrow.parquet as parquet

            table = parquet.read_table(path, partitioning=None)
        table.column_names  # noqa: B018 — names that are not UTF-8 are an error here
    # the keys of an array are row numbers, which fit any other array
    if (
        keys is not None
        and {"anchor_key", "kin_key"} <= set(table.column_names)
        and not re.fullmatch(r"\w+/\d+", keys[0])
    ):
        return _by_key(path, table["anchor_key"].to_pylist(), table["kin_key"].to_pylist(), keys)
    audited = (table.schema.metadata or {}).get(b"kinfolk.samples")
    if num_samples is not None and audited is not None and int(audited) != num_samples:
        raise UsageError(
            f"`{path}` has the pairs of {int(audited):,} samples, but there are {num_samples:,}"
            " training samples; audit exactly these, or give pairs with the columns `anchor_key`"
            " and `kin_key`"
        )
    columns = []
    for name in ("anchor", "kin"):
        if (
            name not in table.column_names
            or not pa.types.is_integer(table[name].type)
            or table[name].null_count
        ):
            raise KinfolkError(
                f"`{path}` must have the columns `anchor` and `kin` of sample ids; it has"
                f" {', '.join(table.column_names)}"
            )
        columns.append(torch.tensor(table[name].to_numpy(), dtype=torch.int64))
    return torch.stack(columns, 1)


def _by_key(path: Path, anchors: list[str], kin: list[str], keys: Sequence[str]) -> Tensor:
    place = {utf8_key(key): at for at, key in enumerate(keys)}
    if path.suffix.lower() == ".csv":
        anchors, kin = (
            [utf8_key(unescape_cell(str(key))) for key in each] for each in (anchors, kin)
        )
    listed = zip(anchors, kin, strict=True)
    found = [(place[one], place[two]) for one, two in listed if one in place and two in place]
    missing = len(anchors) - len(found)
    if anchors and not found:
        raise UsageError(
            f"none of the {len(anchors):,} pairs in `{path}` is of the training samples: it names"
            f" {short(str(anchors[0]))}, they are named like {short(keys[0])}; give the pairs of an"
            " audit of the same data"
        )
    if missing:
        warn(
            f"{missing:,} of {len(anchors):,} pairs in `{path}` name samples that are not in the"
            " training, and are left out"
        )
    return torch.tensor(found, dtype=torch.int64).reshape(-1, 2)


def _by_anchor(
    pairs_P2: Tensor, num_samples: int, symmetric: bool, name: str
) -> tuple[Tensor, Tensor]:
    """(N + 1,) where each anchor's kin begin; (P,) the kin, each once."""
    if len(pairs_P2):
        low, high = (int(x) for x in pairs_P2.aminmax())
        if low < 0 or high >= num_samples:
            raise ValueError(
                f"{name} (=sample id {low if low < 0 else high}) must be in [0, {num_samples}):"
                " there are that many training samples; take the pairs from features of exactly"
                " these, in their order"
            )
    if symmetric:
        pairs_P2 = torch.cat([pairs_P2, pairs_P2.flip(1)])
    pairs_P2 = pairs_P2[pairs_P2[:, 0] != pairs_P2[:, 1]]
    key_P = torch.unique(pairs_P2[:, 0] * num_samples + pairs_P2[:, 1])
    anchor_P, kin_P = key_P.div(num_samples, rounding_mode="floor"), key_P % num_samples
    start_N = torch.searchsorted(anchor_P, torch.arange(num_samples + 1))
    return start_N, kin_P
