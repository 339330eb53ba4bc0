"""Another model says which candidates are kin, or to what degree.

- Guide, by the features of a frozen model: Solatorio, GISTEmbed, 2024, section 3 (negatives closer
  than the positive are left out, here by a margin); Sobal et al., X-CLR, 2024, equation 3
  (similarities as soft targets); for images with captions Gao et al., SoftCLIP, AAAI 2024.
- Teacher, a slow copy of the encoder: Denize et al., Similarity Contrastive Estimation for
  Self-Supervised Soft Contrastive Learning (SCE), WACV 2023, equations 2 to 5; with λ = 0 Zheng et
  al., ReSSL: Relational Self-Supervised Learning with Weak Augmentation, NeurIPS 2021, equations 3
  to 5.

Dimension key: R rows of a block, C candidates, b samples of a block, N data set, F features of the
guide.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from kinfolk.detectors.base import Detector, guide_similarities, register
from kinfolk.detectors.fnc import level_below, top_level
from kinfolk.errors import UsageError, require, warn_if_most_are_flagged
from kinfolk.pairs import OUT, Block, Kin

_CHUNK_ELEMENTS = 1 << 24


@runtime_checkable
class Array(Protocol):
    """A NumPy array, or what can be made one."""

    def __array__(self) -> Any: ...


@register("guide", "Solatorio, 2024; Sobal et al., 2024", "—", action="attract")
class Guide(Detector):
    """Kin are the candidates that a guide, a frozen model of any kind, finds similar to the
    anchor's sample.

        s_ij = cosine similarity of the guide's features of the samples i and j
        alpha         kin: the share α of the anchor's negatives with the highest s_ij
        margin        kin: s_ij > s⁺_i − margin, or with `relative` s_ij > s⁺_i − margin · |s⁺_i|
        temperature   every candidate is kin, with the degree exp((s_ij − s⁺_i) / t_g), at most 1

    s⁺ is the guide's similarity of the anchor to its positive. With one table of features it is 1:
    the positive is another view of the same sample. Pairs of two things (question and answer, image
    and caption) have two tables: s_ij compares anchor i with positive j, as in GISTEmbed, and in
    the other direction of two towers the tables change places. Without features, a loss of images
    and captions compares an image's candidate captions with its caption, and the other way round.

    With `temperature` and "attract", the attraction is divided among positive and candidates as
    softmax(s_ij / t_g), the positive with s⁺: X-CLR's targets. With `degrees`, kin by `alpha` or
    `margin` have the degree (1 + s_ij) / 2, as in CWCL. On a CPU a file stays mapped into memory.
    Features are data, so they are not in `state_dict()`.

    Args:
        features: (N, F) in data-set order, any norm, a tensor or a NumPy array; or a .npy or
            .safetensors file of them, such as the output of `kinfolk embed`.
        positives: the same of the positives. Further rows are explicit negatives, by sample id.
        alpha: α in (0, 1); at least one candidate is kin.
        margin: in [0, 2]; the larger, the more candidates are kin.
        temperature: t_g > 0. Exactly one of the three is given.
        relative: whether `margin` is a share of s⁺ or a difference.
        degrees: whether kin by `alpha` or `margin` have degrees, for "attract" and "reweight".
        num_samples: N, which the features must match.

    Example:
        >>> import torch, kinfolk as kf
        >>> features = torch.eye(2)[torch.tensor([0, 1, 0])]
        >>> loss_fn = kf.NTXentLoss(detector=kf.Guide(features, margin=0.5), action="attract")
        >>> loss_fn(torch.eye(3), torch.eye(3), torch.arange(3)).isfinite().item()
        True
    """

    features: Tensor | None
    positives: Tensor | None

    def __init__(
        self,
        features: str | Path | Tensor | Array | None = None,
        *,
        positives: str | Path | Tensor | Array | None = None,
        alpha: float | None = None,
        margin: float | None = None,
        temperature: float | None = None,
        relative: bool = False,
        degrees: bool = False,
        num_samples: int | None = None,
    ) -> None:
        super().__init__()
        if sum(value is not None for value in (alpha, margin, temperature)) != 1:
            raise ValueError(
                f"exactly one of `alpha` (={alpha}), `margin` (={margin}) and `temperature`"
                f" (={temperature}) must be given"
            )
        require(alpha is None or 0 < alpha < 1, "alpha", alpha, "in (0, 1)")
        require(margin is None or 0 <= margin <= 2, "margin", margin, "in [0, 2]")
        above_0 = temperature is None or 0 < temperature < math.inf
        require(above_0, "temperature", temperature, "above 0")
        if relative and margin is None:
            raise ValueError("`relative` (=True) needs `margin`")
        if degrees and temperature is not None:
            raise ValueError(
                "`degrees` (=True) needs `alpha` or `margin`; with `temperature` kin have degrees"
            )
        if positives is not None and features is None:
            raise ValueError("`positives` must be given with `features`, those of the anchors")
        warn_if_most_are_flagged(alpha)
        self.alpha, self.margin = alpha, margin
        self.temperature, self.relative, self.degrees = temperature, relative, degrees
        features_NF = None if features is None else _read_table(features, "features", num_samples)
        positives_MF = None if positives is None else _read_table(positives, "positives")
        if features_NF is not None and positives_MF is not None:
            (rows, size), (others, other_size) = features_NF.shape, positives_MF.shape
            must = f"as wide as `features` (={(rows, size)}), with a row for each of its rows"
            fits = size == other_size and others >= rows
            require(fits, "positives", (others, other_size), must)
        self.register_buffer("features", features_NF, persistent=False)
        self.register_buffer("positives", positives_MF, persistent=False)

    @classmethod
    def defaults(cls, given: Mapping[str, object]) -> Mapping[str, object]:
        names = ("alpha", "margin", "temperature")
        return {} if any(given.get(name) is not None for name in names) else {"alpha": 0.1}

    @property
    def num_samples(self) -> int | None:  # type: ignore[override]
        tables = [each for each in (self.features, self.positives) if each is not None]
        return max(map(len, tables)) if tables else None

    @property
    def guide(self) -> str | None:  # type: ignore[override]
        return "modality" if self.features is None else None

    @property
    def soft(self) -> bool:  # type: ignore[override]
        return self.temperature is not None

    def swap_towers(self) -> None:
        if self.positives is not None:
            self.features, self.positives = self.positives, self.features

    @torch.no_grad()
    def prepare(
        self, ids_C: Tensor, candidates_CD: Tensor, guide_CG: Tensor | None
    ) -> Tensor | None:
        """(C, F) features of the candidates."""
        return None if self.features is None else self._read(ids_C, candidates_CD.dtype, True)

    @torch.no_grad()
    def find(self, block: Block) -> Kin:
        sim_RC, pos_R1 = self._similarities(block)
        if self.temperature is not None:
            return Kin(((sim_RC - pos_R1) / self.temperature).clamp(max=0).exp())
        if self.margin is not None:
            level_R1 = level_below(pos_R1, self.margin, self.relative)
        else:
            n_R = block.per_row(block.num_negatives_b)
            level_R1 = top_level(sim_RC, n_R, self.alpha).unsqueeze(1)
        kin_RC = sim_RC > level_R1.clamp(min=-2)
        return Kin(kin_RC * (1 + sim_RC).clamp(0, 2) / 2 if self.degrees else kin_RC)

    def _similarities(self, block: Block) -> tuple[Tensor, Tensor]:
        """(R, C) of the guide, `OUT` at the anchor's sample; and s⁺, (R, 1) or (1, 1)."""
        one_11, dtype = block.sim_RC.new_ones(1, 1), block.sim_RC.dtype
        if self.features is None:
            if block.guide_bG is None:
                raise ValueError(
                    "the guide needs `features`; without them it works only in losses of image and"
                    " text"
                )
            return guide_similarities(block), one_11
        features_CF = block.prepared
        if features_CF is None:
            features_CF = self._read(block.candidate_ids, dtype, True)
        anchors_bF = self._read(block.ids, dtype)
        sim_RC = (anchors_bF @ features_CF.T).repeat_interleave(block.num_views, 0)
        sim_RC = sim_RC.masked_fill(block.sim_RC < -2, OUT)
        if self.positives is None:
            return sim_RC, one_11
        pos_b = (anchors_bF * self._read(block.ids, dtype, True)).sum(1)
        return sim_RC, block.per_row(pos_b).unsqueeze(1)

    def _read(self, ids: Tensor, dtype: torch.dtype, of_candidates: bool = False) -> Tensor:
        """(b, F) unit-norm features of samples."""
        table = self.features
        if of_candidates and self.positives is not None:
            table = self.positives
        assert table is not None
        return functional.normalize(table[ids].to(dtype), dim=1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Guide:
        """The features are shared, as they are only read."""
        memo |= {id(table): table for table in (self.features, self.positives)}
        twin = type(self).__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


def read_features(path: str | Path) -> Tensor:
    """(N, F) of a file of features, as `kinfolk embed` writes it."""
    from kinfolk.features import open_features

    return torch.from_numpy(open_features(path))


def _read_table(
    given: str | Path | Tensor | Array, argument: str, num_samples: int | None = None
) -> Tensor:
    """(N, F) floats; that of an array shares its memory. Refuses rows without a direction."""
    in_file = isinstance(given, str | Path)
    name, found = f"`{given if in_file else argument}`", given
    if isinstance(given, str | Path):
        found = read_features(given)
    elif not isinstance(given, Tensor):
        if not isinstance(given, Array):
            raise ValueError(
                f"{name} (={type(given).__name__}) must be a tensor, a NumPy array, or the path of"
                " a .npy or .safetensors file"
            )
        found = _tensor(given)
    dtype, shape = found.dtype, tuple(found.shape)  # type: ignore[union-attr]
    if (
        not isinstance(found, Tensor)
        or not found.is_floating_point()
        or found.ndim != 2
        or not found.numel()
    ):
        raise ValueError(
            f"{name} (={dtype}, shape {shape}) must be floats of the shape (samples, features), at"
            " least one of each"
        )
    if num_samples is not None and len(found) != num_samples:
        raise ValueError(
            f"{name} (={len(found):,} rows) must hold one row for each of the {num_samples:,}"
            " training samples, in data-set order"
        )
    _require_directions(found, name)
    return found.detach()


def _tensor(array: Any) -> Any:
    """The tensor of an array of floats; other arrays as they are."""
    import numpy as np

    array = np.asarray(array)
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        return array
    with warnings.catch_warnings():  # it is only read
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


def _require_directions(features_NF: Tensor, name: str) -> None:
    """Refuses rows that are all 0 or not finite, in parts, because a file may be larger than the
    memory."""
    parts = features_NF.split(max(1, _CHUNK_ELEMENTS // features_NF.shape[1]))  # type: ignore[no-untyped-call]
    largest_N = torch.cat([part_nF.abs().amax(1) for part_nF in parts])
    bad_N = ~((largest_N > 0) & (largest_N < math.inf))
    if bool(bad_N.any()):
        row = int(bad_N.nonzero()[0])
        what = "are all 0" if largest_N[row] == 0 else "are not all finite"
        raise UsageError(
            f"the features of row {row:,} of {name} {what} ({int(bad_N.sum()):,} such rows of"
            f" {len(largest_N):,}); compute the guide's features again for these samples"
        )


@register(
    "teacher",
    "Denize et al., WACV 2023; Zheng et al., NeurIPS 2021",
    "a third, weak view (simclr, sogclr)",
    action="attract",
)
class Teacher(Detector):
    """Every candidate is kin, to the degree to which the teacher finds it similar to the anchor's
    sample.

        degree_ij = exp(τ_ij / t_m) / Σ_{k ≠ i} exp(τ_ik / t_m)

    τ are the similarities of the teacher, which sees a weakly augmented view. With `attract` the
    target of the anchor is y = λ · (own positive) + (1 − λ) · degree, which is SCE; λ is
    `own_weight`, here or of the objective. λ = 1 is the plain loss, λ = 0 with `decoupled` ReSSL.

    `simclr` and `sogclr` keep a slow copy of encoder and head as the teacher, which sees a third
    view; for `moco` and `mocov3` it is the momentum encoder. A bare loss uses `Pairs.guide`, or
    without it the similarities of the block. No state.

    Args:
        temperature: t_m > 0, lower than that of the loss.
        own_weight: λ in [0, 1].
        momentum: of the slow copy of `simclr` and `sogclr`; None: 0.99.

    Example:
        >>> Teacher(temperature=0.05).own_weight
        0.5
    """

    guide = "teacher"
    soft = True

    def __init__(
        self, *, temperature: float = 0.05, own_weight: float = 0.5, momentum: float | None = None
    ) -> None:
        super().__init__()
        require(temperature > 0, "temperature", temperature, "above 0")
        require(0 <= own_weight <= 1, "own_weight", own_weight, "in [0, 1]")
        below_1 = "in [0, 1): at 1 the teacher would never learn"
        require(momentum is None or 0 <= momentum < 1, "momentum", momentum, below_1)
        self.temperature, self.own_weight, self.momentum = temperature, own_weight, momentum

    @torch.no_grad()
    def find(self, block: Block) -> Kin:
        return Kin(torch.softmax(guide_similarities(block) / self.temperature, 1))
