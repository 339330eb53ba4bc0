"""Known kin: pairs that were found beforehand, such as those an audit of a strong foreign model's embeddings lists.

Dimension key: R rows of a block, N data set, P pairs, K listed kin of a row.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from kinfolk.detectors.base import Detector, Found
from kinfolk.errors import KinfolkError, KinfolkWarning, UsageError, shown
from kinfolk.files import first_line
from kinfolk.kinship import Places, Roles
from kinfolk.pairs import Block
from kinfolk.stores.per_sample import check_ids


class Known(Detector):
    """Kin are the listed pairs, whatever the embedding says now.

    No state: pairs are data, so they are not in `state_dict()`.

    Args:
        num_samples: N, size of the data set.
        pairs: (P, 2) integers, sample ids of anchor and kin; or a file with the columns `anchor` and `kin`, `.parquet` or `.csv`, such as
            the `pairs.parquet` of an audit.
        keys: (N,) names of the samples. A file with the columns `anchor_key` and `kin_key` is then matched by name: its pairs may come from
            other samples or another order, and pairs of samples that are not in the training are left out with a warning.
        symmetric: a pair holds both ways, also where only one of the two lists the other.

    Example:
        >>> import torch, kinfolk as kf
        >>> loss_fn = kf.NTXent(temperature=0.1, detector=kf.Known(3, torch.tensor([[0, 2]])))
        >>> loss_fn(torch.eye(3), torch.eye(3), torch.arange(3)).isfinite().item()
        True
    """

    paper: ClassVar[str] = "pairs found beforehand, as by `kinfolk audit`"
    needs: ClassVar[str] = "pairs (--known-kin FILE)"
    addresses: ClassVar[bool] = True

    def __init__(self, num_samples: int, pairs: str | Path | Tensor, symmetric: bool = True, keys: Sequence[str] | None = None) -> None:
        super().__init__()
        if num_samples < 1:
            raise ValueError(f"`num_samples` (={num_samples}) must be at least 1")
        self.num_samples, self.symmetric = num_samples, symmetric
        name = "`pairs`" if isinstance(pairs, Tensor) else f"`{pairs}`"
        pairs_P2 = pairs if isinstance(pairs, Tensor) else read_pairs(pairs, keys, num_samples)
        if pairs_P2.ndim != 2 or pairs_P2.shape[1] != 2 or pairs_P2.is_floating_point() or pairs_P2.dtype == torch.bool:
            raise ValueError(f"{name} (={pairs_P2.dtype}, shape {tuple(pairs_P2.shape)}) must be integers of the shape (pairs, 2)")
        start_N, kin_P = _by_anchor(pairs_P2.to(torch.int64).cpu(), num_samples, symmetric, name)
        self.longest = int(start_N.diff().max())
        self.start_N: Tensor
        self.kin_P: Tensor
        self.register_buffer("start_N", start_N, persistent=False)
        self.register_buffer("kin_P", kin_P, persistent=False)

    def find(self, block: Block) -> Found:
        """Hands over each row's list, as wide as the longest of all."""
        check_ids(block.ids, self.num_samples, "the number of samples")
        ids_R = block.row_ids
        if not self.longest:
            return Found((Roles(),))
        first_R1, end_R1 = self.start_N[ids_R].unsqueeze(1), self.start_N[ids_R + 1].unsqueeze(1)
        place_RK = first_R1 + torch.arange(self.longest, device=ids_R.device)
        listed_RK = torch.where(place_RK < end_R1, self.kin_P[place_RK.clamp(max=len(self.kin_P) - 1)], -1)
        return Found((Roles(kin=Places(listed_RK, block.candidate_ids)),))

    def silent_reason(self) -> str | None:
        return None if len(self.kin_P) else "`pairs` lists no pair of two different samples; give the pairs of these samples"

    def __repr__(self) -> str:
        return f"Known({self.num_samples}, pairs=<{len(self.kin_P)} pairs>, symmetric={self.symmetric})"


def read_pairs(path: str | os.PathLike[str], keys: Sequence[str] | None = None, num_samples: int | None = None) -> Tensor:
    """(P, 2) sample ids of anchor and kin in a table, matched by `keys` (N,) where both sides have keys. Reading it never runs code.

    A table without keys must come from an audit of `num_samples` samples, if it records how many were audited.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"there is no file `{path}` of known kin; give the pairs.parquet that `kinfolk audit` wrote")
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
        raise KinfolkError(f"`{path}` is not a readable table of known kin ({first_line(error)})") from error
    # The keys of an array are only row numbers, which fit any other array: its pairs are matched by the number of samples.
    if keys is not None and {"anchor_key", "kin_key"} <= set(table.column_names) and not re.fullmatch(r"\w+/\d+", keys[0]):
        return _by_key(path, table["anchor_key"].to_pylist(), table["kin_key"].to_pylist(), keys)
    audited = (table.schema.metadata or {}).get(b"kinfolk.samples")
    if num_samples is not None and audited is not None and int(audited) != num_samples:
        raise UsageError(
            f"`{path}` has the pairs of {int(audited):,} samples, but there are {num_samples:,} training samples; "
            "audit exactly these, or give pairs with the columns `anchor_key` and `kin_key`"
        )
    columns = []
    for name in ("anchor", "kin"):
        if name not in table.column_names or not pa.types.is_integer(table[name].type) or table[name].null_count:
            raise KinfolkError(f"`{path}` must have the columns `anchor` and `kin` of sample ids; it has {', '.join(table.column_names)}")
        columns.append(torch.tensor(table[name].to_numpy(), dtype=torch.int64))
    return torch.stack(columns, 1)


def _by_key(path: Path, anchors: list[str], kin: list[str], keys: Sequence[str]) -> Tensor:
    """(P, 2) ids of the pairs whose samples are both among `keys`."""
    place = {key.encode("utf-8", "backslashreplace").decode(): at for at, key in enumerate(keys)}
    found = [(place[one], place[other]) for one, other in zip(anchors, kin, strict=True) if one in place and other in place]
    missing = len(anchors) - len(found)
    if anchors and not found:
        raise UsageError(
            f"none of the {len(anchors):,} pairs in `{path}` is of the training samples: it names {shown(str(anchors[0]))}, "
            f"they are named like {shown(keys[0])}; give the pairs of an audit of the same data"
        )
    if missing:
        text = f"{missing:,} of {len(anchors):,} pairs in `{path}` name samples that are not in the training, and are left out"
        warnings.warn(text, KinfolkWarning, stacklevel=2)
    return torch.tensor(found, dtype=torch.int64).reshape(-1, 2)


def _by_anchor(pairs_P2: Tensor, num_samples: int, symmetric: bool, name: str) -> tuple[Tensor, Tensor]:
    """(N + 1,), (P,): where each anchor's kin begin, and the kin, each once; a sample is not its own kin."""
    if len(pairs_P2):
        low, high = (int(x) for x in pairs_P2.aminmax())
        if low < 0 or high >= num_samples:
            raise ValueError(
                f"{name} (=sample id {low if low < 0 else high}) must be in [0, {num_samples}): there are that many training samples; "
                "take the pairs from features of exactly these, in their order"
            )
    if symmetric:
        pairs_P2 = torch.cat([pairs_P2, pairs_P2.flip(1)])
    pairs_P2 = pairs_P2[pairs_P2[:, 0] != pairs_P2[:, 1]]
    key_P = torch.unique(pairs_P2[:, 0] * num_samples + pairs_P2[:, 1])
    anchor_P, kin_P = key_P.div(num_samples, rounding_mode="floor"), key_P % num_samples
    start_N = torch.searchsorted(anchor_P, torch.arange(num_samples + 1))
    return start_N, kin_P
