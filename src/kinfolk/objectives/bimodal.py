"""Losses of two towers, such as image and text.

- CLIP: Radford et al., ICML 2021, figure 3; the learned temperature of section 2.5.
- Bimodal SogCLR: Yuan et al., ICML 2022, as in GloFND (Balmaseda et al., ICML 2025), section 3.3
  and appendix B.
- SigLIP: Zhai et al., ICCV 2023, equation 1.

Dimension key: B batch, D embedding, R rows of a block, C candidates, N data set.
"""

from __future__ import annotations

import copy
import hashlib
import math
from abc import ABC
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, fields, replace
from typing import Any, ClassVar, Generic, TypedDict, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from kinfolk import distributed
from kinfolk.contrast import Rows, State
from kinfolk.detectors.base import Detector
from kinfolk.errors import require
from kinfolk.objectives.base import HasObjectives, Objective, Settings, group_keys
from kinfolk.objectives.ntxent import NTXentLoss
from kinfolk.objectives.sogclr import AveragedLoss, SogCLRLoss
from kinfolk.pairs import Pairs, integer_ids, unit


class LearnedTemperature(nn.Module):
    """t = exp(−`logit_scale`) in [lowest, highest]. In training the parameter is clamped, so that
    it keeps a gradient.

    Example:
        >>> round(LearnedTemperature(0.07)().item(), 4)
        0.07
    """

    def __init__(
        self, initial: float, lowest: float = 0.01, highest: float = 1.0, gradient_factor: float = 1
    ) -> None:
        super().__init__()
        require(0 < lowest < highest, "min_temperature", lowest, f"above 0 and below {highest}")
        within = f"in [{lowest}, {highest}]"
        require(lowest <= initial <= highest, "temperature", initial, within)
        self.lowest, self.highest, self.gradient_factor = lowest, highest, gradient_factor
        self.logit_scale = nn.Parameter(torch.tensor(-math.log(initial)))

    def forward(self) -> Tensor:
        bounds = -math.log(self.highest), -math.log(self.lowest)
        if self.training:
            with torch.no_grad():
                self.logit_scale.clamp_(*bounds)
        scale = distributed.average_gradient(self.logit_scale)
        scale = scale if scale.dtype == torch.float64 else scale.float()
        t = torch.exp(-(scale if self.training else scale.clamp(*bounds)))
        return t.detach() + self.gradient_factor * (t - t.detach())

    @property
    def value(self) -> float:
        return float(torch.exp(-self.logit_scale.detach().float()).clamp(self.lowest, self.highest))


Direction = TypeVar("Direction", bound=Objective)


class Negatives(TypedDict, total=False):
    """Explicit negatives, K for each pair: further candidates of the first tower's anchors."""

    negatives: Tensor | None  # (B, K, D) embeddings of the second tower
    negative_ids: Tensor | None  # (B, K), if anything is looked up per sample
    negative_group_ids: Tensor | None  # (B, K), as `group_ids`
    own_only: bool  # a negative counts for the anchor of its row, not for all
    in_batch: bool  # False: explicit negatives alone; the other direction has none and is left out


class TwoTowers(Settings, ABC):
    """Abstract."""

    def pairs_of(
        self,
        image: Tensor,
        text: Tensor,
        ids: Tensor | None,
        group_ids: Tensor | None,
        objective: Objective,
        **explicit: Unpack[Negatives],
    ) -> tuple[Pairs, Pairs]:
        """The pairs of both directions; `explicit` is for the first."""
        if image.ndim != 2 or text.shape != image.shape or not image.numel():
            shapes = f"`image_features` (={tuple(image.shape)}) and `text_features`"
            raise ValueError(
                f"{shapes} (={tuple(text.shape)}) must have one shape (batch, embedding), neither"
                " of them 0: row i of both belongs to one sample"
            )
        _check_shapes(image.shape[:1], "pair", ids=ids, group_ids=group_ids)
        ids = objective.number(image) if ids is None else integer_ids(ids, image.device)
        objective.check_ids(ids)
        if group_ids is None and objective.groups is not None:
            group_ids = objective.groups.to(image.device)[ids]
        if group_ids is None and explicit.get("negative_group_ids") is not None:
            group_ids = torch.full_like(ids, -1)
        keys = ids
        if group_ids is not None:
            keys = group_keys(ids, integer_ids(group_ids, image.device, "group_ids"))

        dtype = torch.promote_types(image.dtype, text.dtype)
        image, text = unit(image.to(dtype)), unit(text.to(dtype))

        def one_way(anchors: Tensor, others: Tensor) -> Pairs:
            pairs = Pairs(
                *(anchors, others, others.unsqueeze(1), ids, ids),
                groups=keys,
                candidate_groups=keys,
                local_candidates=True,
                unit=True,
            )
            if objective.detector is None or objective.detector.guide != "modality":
                return pairs
            guide = others.detach()  # compared with the anchor's positive
            return replace(pairs, guide=guide, candidate_guide=guide)

        first = one_way(image, text)
        if explicit.get("negatives") is not None:
            first = with_negatives(first, objective, group_ids is not None, **explicit)
        elif not explicit.get("in_batch", True):
            raise ValueError("`in_batch` (=False) needs `negatives`")
        return first, one_way(text, image)


NO_KEY = torch.iinfo(torch.int64).min  # of a candidate in no anchor's group


def _check_shapes(shape: torch.Size, what: str, **given: Tensor | None) -> None:
    for name, value in given.items():
        if isinstance(value, Tensor) and value.shape != shape:
            must = f"must have the shape {tuple(shape)}: one for each {what}"
            raise ValueError(f"`{name}` (={tuple(value.shape)}) {must}")


def with_negatives(
    pairs: Pairs, objective: Objective, grouped: bool, **explicit: Unpack[Negatives]
) -> Pairs:
    z, given = explicit["negatives"], explicit.get("negative_ids")
    assert z is not None
    groups, (rows, size) = explicit.get("negative_group_ids"), pairs.anchors.shape
    right = z.ndim == 3 and (len(z), z.shape[2]) == (rows, size) and z.numel() > 0
    must = f"of the shape ({rows}, negatives, {size}): some for each pair"
    require(right, "negatives", tuple(z.shape), must)
    _check_shapes(z.shape[:2], "negative", negative_ids=given, negative_group_ids=groups)
    if given is None:
        if objective.looks_up:
            raise ValueError("`negative_ids` must be given: state is looked up by sample id")
        place_B1 = objective.number(z[:, 0]).unsqueeze(1) * z.shape[1]
        ids_BK = -1 - (place_B1 + torch.arange(z.shape[1], device=z.device))  # no sample's
        keys_BK = torch.full_like(ids_BK, NO_KEY)
    else:
        ids_BK = integer_ids(given, z.device, "negative_ids")
        objective.check_ids(ids_BK.flatten())
        keys_BK = group_keys(ids_BK, torch.full_like(ids_BK, -1)) if grouped else ids_BK
        if groups is None and objective.groups is not None:
            groups = objective.groups.to(z.device)[ids_BK]
    if groups is not None:
        groups = integer_ids(groups, z.device, "negative_group_ids")
        keys_BK = torch.where(groups >= 0, groups, keys_BK)
    z = unit(z)
    added = {"candidates": z, "candidate_ids": ids_BK, "candidate_groups": keys_BK}
    if pairs.candidate_guide is not None:
        added["candidate_guide"] = z.detach()
    found: dict[str, Any] = {
        name: torch.cat((getattr(pairs, name), each.flatten(0, 1))) for name, each in added.items()
    }
    own_only, in_batch = explicit.get("own_only", False), explicit.get("in_batch", True)
    if own_only or not in_batch:
        all_B, all_BK = torch.full_like(pairs.ids, -1), torch.full_like(ids_BK, -1)
        owners_BK = pairs.ids.unsqueeze(1).expand_as(ids_BK) if own_only else all_BK
        owners_B = all_B if in_batch else pairs.ids
        found["candidate_owners"] = torch.cat((owners_B, owners_BK.flatten()))
    return replace(pairs, **found)


def group_ids_of(values: Iterable[object]) -> Tensor:
    """(N,) group ids of values such as texts, the same in every process. None and "" are in no
    group (−1).

    Example:
        >>> group_ids_of(["the same", "the same", "another", ""]).tolist()
        [2756309347845926284, 2756309347845926284, 4577460340923015228, -1]
    """

    def hash_value(value: object) -> int:
        if value is None or value == "":
            return -1
        text = value if isinstance(value, str) else repr(value)
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    return torch.tensor([hash_value(value) for value in values], dtype=torch.int64)


class BimodalLoss(HasObjectives, TwoTowers, ABC, Generic[Direction]):
    """Abstract. The mean of a loss of images against texts and one of texts against images, each
    with its state and a copy of the detector."""

    image: Direction
    text: Direction
    learned: LearnedTemperature | None

    def build(self, kind: type[Direction], learned: LearnedTemperature | None, **more: Any) -> None:
        """Makes both directions from the shared settings and `more`."""
        names = [each.name for each in fields(Settings) if each.name != "detector"]
        shared = {name: getattr(self, name) for name in names} | {"compile": self.compiles} | more
        detector = self.detector
        del self.detector  # it belongs to the directions
        second = copy.deepcopy(detector)
        for part in () if second is None else second.modules():
            if isinstance(part, Detector):
                part.swap_towers()
        self.image, self.text = (kind(detector=each, **shared) for each in (detector, second))
        self.learned = learned

    def __getattr__(self, name: str) -> Any:
        if name == "detector" and "image" in self._modules:
            return self.image.detector
        return super().__getattr__(name)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        ids: Tensor | None = None,
        group_ids: Tensor | None = None,
        **explicit: Unpack[Negatives],
    ) -> Tensor:
        """Scalar: the mean over the 2B anchors of all ranks.

        Args:
            image_features, text_features: (B, D), of any norm; row i of both is one sample.
            ids: (B,) sample ids, if anything is looked up by them.
            group_ids: (B,) known positives: samples of one group, such as captions of one image,
                are never each other's negatives. Below 0: no group.
            explicit: see `Negatives`.
        """
        pairs = self.pairs_of(image_features, text_features, ids, group_ids, self.image, **explicit)
        temperature = None if self.learned is None else self.learned()
        loss = self.image.on(pairs[0], temperature)
        if not explicit.get("in_batch", True):
            return loss
        return (loss + self.text.on(pairs[1], temperature)) / 2

    @property
    def objectives(self) -> tuple[Direction, Direction]:
        return self.image, self.text

    @property
    def current_temperature(self) -> float:
        return self.temperature if self.learned is None else self.learned.value

    def temperature_parameters(self) -> list[nn.Parameter]:
        """For a parameter group without weight decay; empty if t is constant."""
        return [] if self.learned is None else list(self.learned.parameters())


@dataclass(kw_only=True, eq=False, repr=False)
class CLIPLoss(BimodalLoss[NTXentLoss]):
    """InfoNCE of image and text in both directions, with a learned temperature.

        loss = ½ mean_i ( −s_ii / t + log( exp(s_ii / t) + Σ_{j ≠ i} w_ij exp(s_ij / t) ) )
             + ½ mean_i ( −s_ii / t + log( exp(s_ii / t) + Σ_{j ≠ i} v_ij exp(s_ji / t) ) )

    w, v: 0 where j shares the group of i; for kin see `NTXentLoss`; else 1. State:
    `learned.logit_scale` = −log t and the detectors'.

    Args:
        learnable: whether t is learned.
        min_temperature: of the learned t; the default is the paper's, a scale of at most 100.
        decoupled, prior, hardness: see `NTXentLoss`.
        temperature, detector, …: see `Settings`.

    Example:
        >>> import torch, kinfolk as kf
        >>> loss_fn = kf.CLIPLoss(temperature=0.5)
        >>> round(loss_fn(torch.eye(4), torch.eye(4)).item(), 4)
        0.3408
        >>> groups = torch.tensor([0, 0, 0, 1])
        >>> round(loss_fn(torch.eye(4), torch.eye(4), group_ids=groups).item(), 4)
        0.1804
    """

    temperature: float = 0.07
    learnable: bool = True
    min_temperature: float = 0.01
    decoupled: bool = False
    prior: float | None = None
    hardness: float | None = None

    def __post_init__(self, compile: bool) -> None:
        super().__post_init__(compile)
        learned = LearnedTemperature(self.temperature, self.min_temperature)
        estimate = {"decoupled": self.decoupled, "prior": self.prior, "hardness": self.hardness}
        self.build(NTXentLoss, learned if self.learnable else None, **estimate)


@dataclass(kw_only=True, eq=False, repr=False)
class BimodalSogCLRLoss(BimodalLoss[SogCLRLoss]):
    """The global contrastive loss of image and text, with a moving average of the negatives of each
    image and of each text.

        ĝ_I,i = mean over the kept texts j ≠ i of exp(s_ij / t), and so ĝ_T
        u_I,i ← (1 − γ) u_I,i + γ ĝ_I,i, and so u_T
        value    mean_i( −s_ii + ½ t·log u_I,i + ½ t·log u_T,i )
        gradient mean_i( −∇s_ii + ½ (t / u_I,i) ∇ĝ_I,i + ½ (t / u_T,i) ∇ĝ_T,i )

    Candidates of the anchor's group, and with "eliminate" or "attract" its kin, are not in ĝ.
    State: `image.u`, `text.u` and the detectors'.

    Args:
        num_samples, gamma, decay_epochs: see `SogCLRLoss`.
        temperature, detector, …: see `Settings`.

    Deviates from the paper in: half of its sum of the two directions, without its constant, t times
    the logarithm of the number of negatives.

    Example:
        >>> import torch, kinfolk as kf
        >>> loss_fn = kf.BimodalSogCLRLoss(num_samples=100)
        >>> round(loss_fn(torch.eye(4), torch.eye(4), torch.arange(4)).item(), 4)
        -1.0
    """

    temperature: float = 0.03
    num_samples: int
    gamma: float = 0.2
    decay_epochs: int | None = 18

    refused = AveragedLoss.refused

    def __post_init__(self, compile: bool) -> None:
        super().__post_init__(compile)
        average = {"gamma": self.gamma, "decay_epochs": self.decay_epochs}
        self.build(SogCLRLoss, None, num_samples=self.num_samples, **average)


@dataclass(kw_only=True, eq=False, repr=False)
class SigLIPLoss(Objective, TwoTowers):
    """Each pair of an image and a text is classified by itself: a sigmoid, no softmax.

        loss = −(1 / B) Σ_ij w_ij log σ( y_ij (s_ij / t + b) )

    y_ij is 1 where j is the text of i or shares its group, else −1. w_ij is 1; of kin 0 with
    "eliminate", 1 − degree or `kin_weight` with "reweight". With "attract" kin are positives to
    their degree d: −d log σ(x) − (1 − d) log σ(−x). `min_negatives` has no effect. Images are the
    anchors of the detector. State: t, b and the detector's.

    Args:
        bias: b at the start, low so that negatives do not dominate the first steps.
        learnable: whether t and b are learned.
        min_temperature: of the learned t.
        temperature, detector, …: see `Settings`.

    Example:
        >>> import torch, kinfolk as kf
        >>> loss_fn = kf.SigLIPLoss(temperature=0.5, bias=-1.0)
        >>> round(loss_fn(torch.eye(4), torch.eye(4)).item(), 4)
        1.253
    """

    bias: InitVar[float] = -10.0  # the attribute is the learned parameter
    learnable: bool = True
    min_temperature: float = 0.001

    keeps_negatives: ClassVar[bool] = False
    shares_pull: ClassVar[bool] = False
    refused: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("prior", "hardness", "decoupled"),
        "each pair is classified by itself, so there is no sum over negatives",
    )

    def __post_init__(self, compile: bool, bias: float) -> None:
        super().__post_init__(compile)
        self.learned = LearnedTemperature(self.temperature, self.min_temperature)
        self.learned.requires_grad_(self.learnable)
        self.bias = nn.Parameter(torch.tensor(float(bias)), requires_grad=self.learnable)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        ids: Tensor | None = None,
        group_ids: Tensor | None = None,
        **explicit: Unpack[Negatives],
    ) -> Tensor:
        """Scalar: the mean over the images of all ranks; see `BimodalLoss.forward`."""
        pairs, _ = self.pairs_of(image_features, text_features, ids, group_ids, self, **explicit)
        bias: Any = self.bias
        return self.on(pairs, self.learned(), (distributed.average_gradient(bias),))

    def row_loss(self, rows: Rows) -> tuple[Tensor, State]:
        x = rows.sim / rows.t.unsqueeze(1) + rows.parameters[0]
        target = rows.own.to(x.dtype) if rows.y is None else rows.own + rows.y
        weight = rows.log_w.exp() + rows.own  # the positives are not among the negatives
        return (weight * (F.softplus(x) - target * x)).sum(1), {}

    @property
    def current_temperature(self) -> float:
        return self.learned.value

    @property
    def objectives(self) -> tuple[SigLIPLoss]:
        return (self,)


del SigLIPLoss.bias  # type: ignore[attr-defined]  # a class attribute would hide the parameter
