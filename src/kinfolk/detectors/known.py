"""Kin that are known beforehand: by true labels, or as listed pairs.

Dimension key: R rows of a block, N data set, P pairs, K listed kin of a row.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kinfolk.detectors.base import Detector, register
from kinfolk.errors import (
    KinfolkError,
    KinfolkWarning,
    UsageError,
    require,
    short,
    unescape_cell,
    utf8_key,
)
from kinfolk.files import first_line
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
    """(N,) integers of a .npy file."""
    import numpy as np

    if not path.is_file():
        raise UsageError(
            f"`labels_file` (={path}) does not exist; give a .npy file with one integer for each"
            " training sample"
        )
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"`labels_file` (={path}) is not a readable .npy file of integers"
            f" ({' '.join(str(error).split())})"
        ) from error
    if (
        not isinstance(array, np.ndarray)
        or array.ndim != 1
        or array.dtype.kind not in "iu"
        or (expected or len(array)) != len(array)
    ):
        shape = getattr(array, "shape", None)
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
        pairs: (P, 2) integers, sample ids of anchor and kin; or a `.parquet` or `.csv` file with
            the columns `anchor` and `kin`, such as the `pairs.parquet` of an audit.
        num_samples: N.
        symmetric: a pair counts in both directions.
        keys: (N,) names of the samples. A file with the columns `anchor_key` and `kin_key` is then
            matched by name, and pairs of other samples are left out with a warning.
        similarities: (P,) with `Graded` the degree of kinship, cut to [0, 1]; of a pair that is
            listed more than once the highest. None: the column `similarity` of the file, if any.

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
    degree_P: Tensor | None

    def __init__(
        self,
        pairs: str | Path | Tensor,
        *,
        num_samples: int,
        symmetric: bool = True,
        keys: Sequence[str] | None = None,
        similarities: Tensor | None = None,
    ) -> None:
        super().__init__()
        require(num_samples >= 1, "num_samples", num_samples, "at least 1")
        self.num_samples = num_samples
        name = "`pairs`" if isinstance(pairs, Tensor) else f"`{pairs}`"
        pairs_P2, listed_P = (
            (pairs, None) if isinstance(pairs, Tensor) else read_known(pairs, keys, num_samples)
        )
        listed_P = listed_P if similarities is None else similarities
        if pairs_P2.ndim != 2 or pairs_P2.shape[1] != 2 or not is_integer(pairs_P2):
            raise ValueError(
                f"{name} (={pairs_P2.dtype}, shape {tuple(pairs_P2.shape)}) must be integers of the"
                " shape (pairs, 2)"
            )
        if listed_P is not None and (
            listed_P.shape != (len(pairs_P2),) or not bool(listed_P.isfinite().all())
        ):
            shape = tuple(listed_P.shape)
            raise ValueError(
                f"`similarities` (=shape {shape}) must be one finite number for each of"
                f" {len(pairs_P2):,} pairs"
            )
        start_N, kin_P, degree_P = _by_anchor(
            pairs_P2.to(torch.int64).cpu(), num_samples, symmetric, name, listed_P
        )
        self.longest = int(start_N.diff().max())
        for name, table in (("start_N", start_N), ("kin_P", kin_P), ("degree_P", degree_P)):
            self.register_buffer(name, table, persistent=False)

    @torch.no_grad()
    def find(self, block: Block) -> Kin:
        if not self.longest:
            return Kin()
        ids_R = block.row_ids
        first_R1, end_R1 = self.start_N[ids_R].unsqueeze(1), self.start_N[ids_R + 1].unsqueeze(1)
        place_RK = first_R1 + torch.arange(self.longest, device=ids_R.device)
        last_RK = place_RK.clamp(max=len(self.kin_P) - 1)
        listed_RK = torch.where(place_RK < end_R1, self.kin_P[last_RK], -1)
        degree_RK = torch.ones_like(listed_RK, dtype=block.sim_RC.dtype)
        if block.degrees and self.degree_P is not None:
            degree_RK = self.degree_P[last_RK].to(block.sim_RC.dtype)
        listed_RC = values_of_listed(listed_RK, block.candidate_ids, degree_RK)
        return Kin(listed_RC if block.degrees and self.degree_P is not None else listed_RC > 0)

    def silent_reason(self, first_epoch: int = 0) -> str | None:
        why = "`pairs` lists no pair of two different samples; give the pairs of these samples"
        return None if len(self.kin_P) else why


def values_of_listed(ids_RK: Tensor, ids_C: Tensor, value_RK: Tensor) -> Tensor:
    """(R, C) the value of each candidate whose id the row lists, 0 elsewhere. An id below 0 is
    none.

    The places of the matches would be as many as only the device knows. Instead, ids are ranked
    among the candidates', values are written to the ranks, and each candidate reads its rank."""
    sorted_C, order_C = ids_C.sort()
    rank_C = torch.empty_like(order_C).scatter_(0, order_C, torch.searchsorted(sorted_C, sorted_C))
    rank_RK = torch.searchsorted(sorted_C, ids_RK).clamp(max=len(sorted_C) - 1)
    there_RK = (sorted_C[rank_RK] == ids_RK) & (ids_RK >= 0)
    marked_RC = value_RK.new_zeros(len(ids_RK), len(sorted_C) + 1)
    marked_RC.scatter_(1, torch.where(there_RK, rank_RK, len(sorted_C)), value_RK)
    return marked_RC[:, rank_C]


def read_known(
    path: str | os.PathLike[str], keys: Sequence[str] | None = None, num_samples: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """(P, 2) sample ids of anchor and kin in a table, matched by `keys` (N,) if both sides have
    keys, and their (P,) similarities if it has the column. A table without keys must come from an
    audit of `num_samples` samples, if it records how many were audited."""
    path = Path(path)
    if not path.is_file():
        raise UsageError(
            f"there is no file `{path}` of known kin; give the pairs.parquet that `kinfolk audit`"
            " wrote"
        )
    import pyarrow as pa

    try:
        if path.suffix.lower() == ".csv":
            import pyarrow.csv as tables

            table = tables.read_csv(path)
        else:
            import pyarrow.parquet as parquet

            table = parquet.read_table(path, partitioning=None)
        table.column_names  # noqa: B018 — names that are not UTF-8 are an error here
    except Exception as error:  # readers raise nearly anything on a broken file
        raise KinfolkError(
            f"`{path}` is not a readable table of known kin ({first_line(error)})"
        ) from error
    similarity = _similarities(path, table)
    # the keys of an array are row numbers, which fit any other array
    if (
        keys is not None
        and {"anchor_key", "kin_key"} <= set(table.column_names)
        and not re.fullmatch(r"\w+/\d+", keys[0])
    ):
        pairs_P2, rows_P = _by_key(
            path, table["anchor_key"].to_pylist(), table["kin_key"].to_pylist(), keys
        )
        return pairs_P2, None if similarity is None else similarity[rows_P]
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
    return torch.stack(columns, 1), similarity


def _similarities(path: Path, table: Any) -> Tensor | None:
    """(P,) the column `similarity`, or None if there is none."""
    import pyarrow as pa

    if "similarity" not in table.column_names:
        return None
    column = table["similarity"]
    if (
        not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type))
        or column.null_count
    ):
        raise KinfolkError(
            f"the column `similarity` of `{path}` (={column.type}) must be a number for each pair;"
            " correct it or leave it out"
        )
    return torch.tensor(column.to_numpy(), dtype=torch.float32)


def _by_key(
    path: Path, anchors: list[str], kin: list[str], keys: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """(P, 2) ids of the pairs of samples among `keys`, and (P,) their rows in the table."""
    place = {utf8_key(key): at for at, key in enumerate(keys)}
    if path.suffix.lower() == ".csv":
        anchors, kin = (
            [utf8_key(unescape_cell(str(key))) for key in each] for each in (anchors, kin)
        )
    listed = enumerate(zip(anchors, kin, strict=True))
    found = [
        (row, place[one], place[other])
        for row, (one, other) in listed
        if one in place and other in place
    ]
    missing = len(anchors) - len(found)
    if anchors and not found:
        raise UsageError(
            f"none of the {len(anchors):,} pairs in `{path}` is of the training samples: it names"
            f" {short(str(anchors[0]))}, they are named like {short(keys[0])}; give the pairs of an"
            " audit of the same data"
        )
    if missing:
        text = (
            f"{missing:,} of {len(anchors):,} pairs in `{path}` name samples that are not in the"
            " training, and are left out"
        )
        warnings.warn(text, KinfolkWarning, stacklevel=2)
    found_P3 = torch.tensor(found, dtype=torch.int64).reshape(-1, 3)
    return found_P3[:, 1:], found_P3[:, 0]


def _by_anchor(
    pairs_P2: Tensor, num_samples: int, symmetric: bool, name: str, similarities: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(N + 1,), (P,), (P,): where each anchor's kin begin; the kin, each once; their degrees."""
    if len(pairs_P2):
        low, high = (int(x) for x in pairs_P2.aminmax())
        if low < 0 or high >= num_samples:
            raise ValueError(
                f"{name} (=sample id {low if low < 0 else high}) must be in [0, {num_samples}):"
                " there are that many training samples; take the pairs from features of exactly"
                " these, in their order"
            )
    degree_P = None if similarities is None else similarities.detach().float().cpu().clamp(0, 1)
    if symmetric:
        pairs_P2 = torch.cat([pairs_P2, pairs_P2.flip(1)])
        degree_P = None if degree_P is None else degree_P.repeat(2)
    other_P = pairs_P2[:, 0] != pairs_P2[:, 1]
    pairs_P2, degree_P = pairs_P2[other_P], None if degree_P is None else degree_P[other_P]
    key_P, place_P = torch.unique(
        pairs_P2[:, 0] * num_samples + pairs_P2[:, 1], return_inverse=True
    )
    if degree_P is not None:
        degree_P = torch.zeros(len(key_P)).scatter_reduce(0, place_P, degree_P, "amax")
    anchor_P, kin_P = key_P.div(num_samples, rounding_mode="floor"), key_P % num_samples
    start_N = torch.searchsorted(anchor_P, torch.arange(num_samples + 1))
    return start_N, kin_P, degree_P
