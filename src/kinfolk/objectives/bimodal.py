"""A temperature that is learned, as CLIP has it: the logarithm of its inverse is the parameter.

Radford et al., Learning Transferable Visual Models From Natural Language Supervision, ICML 2021, section 2.5.

What the losses of image and text share: two directions, each with anchors of one tower and candidates of the other.

Balmaseda et al., Discovering Global False Negatives On the Fly for Self-supervised Contrastive Learning, ICML 2025, section 3.3 and
appendix B.

Dimension key: B batch, D embedding, N data set.

CLIP: Radford et al., Learning Transferable Visual Models From Natural Language Supervision, ICML 2021, figure 3.

Dimension key: B batch, D embedding.
"""

from __future__ import annotations

import copy
import math
from abc import ABC
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from kinfolk import distributed
from kinfolk.contrast import Across, Contrast
from kinfolk.detectors.base import Detector, guidance_of
from kinfolk.objectives.base import Objective, call, unit
from kinfolk.objectives.ntxent import Estimate, NTXent
from kinfolk.pairs import Pairs, require_integers
from kinfolk.stats import Stats


class LearnedTemperature(nn.Module):
    """t = exp(−`logit_scale`), kept within [lowest, highest]: in training the parameter itself is brought back before it is used, so that
    it never rests where it has no gradient. Under a process group its gradient is the same on all ranks.

    Args:
        initial: t at the start.
        lowest, highest: of t; 0.01 is the scale of at most 100 of the paper.
        gradient_factor: what the gradient that t receives is multiplied by.

    Example:
        >>> round(LearnedTemperature(0.07)().item(), 4)
        0.07
    """

    def __init__(self, initial: float, lowest: float = 0.01, highest: float = 1.0, gradient_factor: float = 1.0) -> None:
        super().__init__()
        if not 0 < lowest < highest:
            raise ValueError(f"`min_temperature` (={lowest}) must be above 0 and below {highest}")
        if not lowest <= initial <= highest:
            raise ValueError(f"`temperature` (={initial}) must be in [{lowest}, {highest}]")
        self.initial, self.lowest, self.highest, self.gradient_factor = initial, lowest, highest, gradient_factor
        self.logit_scale = nn.Parameter(torch.tensor(-math.log(initial)))

    def forward(self) -> Tensor:
        """t, without dimensions."""
        bounds = -math.log(self.highest), -math.log(self.lowest)
        if self.training:
            with torch.no_grad():
                self.logit_scale.clamp_(*bounds)
        scale = distributed.averaged(self.logit_scale)
        scale = scale if scale.dtype == torch.float64 else scale.float()
        t = torch.exp(-(scale if self.training else scale.clamp(*bounds)))
        return t if self.gradient_factor == 1 else t.detach() + self.gradient_factor * (t - t.detach())


Direction = TypeVar("Direction", bound=Objective)


class Bimodal(nn.Module, ABC, Generic[Direction]):
    """Abstract. The mean of two losses: of image anchors against texts, and of text anchors against images.

    The other tower's embedding of the same sample is the positive. What shares the anchor's id or group is never a negative. Everything
    that is kept per sample (thresholds, moving averages, temperatures) is kept once for each direction. Only embeddings, ids and numbers
    per sample cross ranks.

    Args:
        make: makes the loss of one direction from its detector.
        detector: of the images' direction; the texts' has a copy of it.
        learned: the temperature, where it is learned: one for both directions.
    """

    def __init__(
        self, make: Callable[[Detector | None], Direction], detector: Detector | None, learned: LearnedTemperature | None = None
    ) -> None:
        super().__init__()
        self.image, self.text = make(detector), make(copy.deepcopy(detector))
        self.learned = learned

    def forward(self, image_features: Tensor, text_features: Tensor, ids: Tensor | None = None, group_ids: Tensor | None = None) -> Tensor:
        """Scalar: the mean over the 2B anchors of all ranks.

        Args:
            image_features, text_features: (B, D), of any norm; row i of both belongs to one sample.
            ids: (B,) sample ids. May be left out where nothing is kept or looked up per sample.
            group_ids: (B,) known positives: samples of one group (captions of one image, equal captions) are never each other's
                negatives. Below 0: of no group.
        """
        if torch.compiler.is_compiling():
            whole = torch.compiler.disable(self.forward)  # type: ignore[no-untyped-call]
            outside: Tensor = whole(image_features, text_features, ids, group_ids)
            return outside
        check_inputs(image_features, text_features, ids, group_ids)
        device = image_features.device
        ids = self.image.numbered(image_features) if ids is None else ids.to(device, torch.int64)
        keys = ids if group_ids is None else known(ids, group_ids.to(device, torch.int64))
        temperature = None if self.learned is None else self.learned()
        images, texts = unit(image_features), unit(text_features)

        def direction(objective: Objective, anchors: Tensor, others: Tensor) -> Contrast:
            guided = guidance_of(objective.detector).reads == "modality"
            guide = others.detach() if guided else None  # how similar the candidates are to the anchor's own one of them
            pairs = Pairs(
                anchors,
                others,
                others.unsqueeze(1),
                ids,
                ids,
                groups=keys,
                candidate_groups=keys,
                unit=True,
                local_candidates=True,
                guide=guide,
                candidate_guide=guide,
            )
            return objective.work(pairs, temperature)

        works = direction(self.image, images, texts), direction(self.text, texts, images)
        losses = both_ways(*works) if crosses(works[1]) else (works[0].loss(), works[1].loss())
        for objective, work, loss in zip(self.objectives, works, losses, strict=True):
            objective.finish(work, loss)
        return (losses[0] + losses[1]) / 2

    @property
    def objectives(self) -> tuple[Direction, Direction]:
        """The losses of the two directions: of image anchors, of text anchors."""
        return self.image, self.text

    @property
    def stats(self) -> Stats:
        """The counts of the last call, of both directions."""
        return self.image.stats + self.text.stats

    @property
    def temperature(self) -> float:
        """t, as it is now."""
        if self.learned is None:
            return self.image.temperature
        return float(torch.exp(-self.learned.logit_scale.detach().float()).clamp(self.learned.lowest, self.learned.highest))

    def temperature_parameters(self) -> list[nn.Parameter]:
        """What is learned of the temperature, for a parameter group of its own without weight decay; empty where it is not learned."""
        return [] if self.learned is None else list(self.learned.parameters())

    @property
    def temperature_lr_factor(self) -> float:
        """What the learning rate of the temperature is to be multiplied with now. Default: 1."""
        return 1.0

    def set_eval_labels(self, labels: Tensor | None) -> None:
        """Gives (N,) labels for precision, recall and F1 in `stats`; −1: unknown. They never touch the loss."""
        for objective in self.objectives:
            objective.set_eval_labels(labels)

    def set_progress(self, epoch: float, num_epochs: int) -> None:
        """Tells schedules and warm-ups where the training is; see `Objective.set_progress`."""
        for objective in self.objectives:
            objective.set_progress(epoch, num_epochs)


def crosses(work: Contrast) -> bool:
    """Whether a few numbers of each anchor describe a direction: kin above a level, left out, and one temperature for all."""
    one = not isinstance(work.temperature, Tensor) or work.temperature.ndim == 0
    one = one and not work.policy.hardness
    return one and (work.detector is None or (work.detector.leveled and work.policy.action == "eliminate"))


def both_ways(forth: Contrast, back: Contrast) -> tuple[Tensor, Tensor]:
    """The losses of the two directions; the gradient of both is that of the first, see `Across`."""
    with torch.no_grad():
        across = Across(back.temperature)
        back.gives = across
        back_loss = back.loss()
        across.settle(back.sizes)
    forth.takes = across
    return forth.loss(), back_loss


def known(ids: Tensor, group_ids: Tensor) -> Tensor:
    """(B,) keys that agree for samples of one group, and for a sample of no group only with itself.

    Example:
        >>> known(torch.tensor([5, 6, 7, 5]), torch.tensor([0, 0, -1, -1]))
        tensor([ 0,  0, -8, -6])
    """
    return torch.where(group_ids >= 0, group_ids, -1 - ids)


def check_inputs(image_features: Tensor, text_features: Tensor, ids: Tensor | None, group_ids: Tensor | None) -> None:
    """Refuses inputs of a loss of image and text whose shapes or types do not fit."""
    shape = tuple(image_features.shape)
    if image_features.ndim != 2 or text_features.shape != image_features.shape or not image_features.numel():
        raise ValueError(
            f"`image_features` (={shape}) and `text_features` (={tuple(text_features.shape)}) must have one shape (batch, embedding), "
            "neither of them 0: row i of both belongs to one sample"
        )
    for name, given in (("ids", ids), ("group_ids", group_ids)):
        if given is None:
            continue
        if given.shape != shape[:1]:
            raise ValueError(f"`{name}` (={tuple(given.shape)}) must have the shape {shape[:1]}: one for each pair of image and text")
        require_integers(name, given)


class CLIPLoss(Bimodal[NTXent]):
    """InfoNCE of image and text in both directions, with a learned temperature.

        loss = ½ mean_i ( −s_ii / t + log( exp(s_ii / t) + Σ_{j ≠ i} w_ij exp(s_ij / t) ) )     images i, texts j
             + ½ mean_i ( −s_ii / t + log( exp(s_ii / t) + Σ_{j ≠ i} v_ij exp(s_ji / t) ) )     texts i, images j

    w, v: 1; 0 where j shares the group of i; for kin as the action says, see `NTXent`. Without groups and detector it is the cross-entropy
    over rows and columns of the matrix of similarities. State: the temperature, as the logarithm of its inverse (`learned.logit_scale`),
    and that of the two detectors.

    Args:
        temperature: t at the start.
        learnable: False keeps it.
        min_temperature: the learned t never falls below; 0.01 is the scale of at most 100 of the paper.
        detector, action, min_negatives, kin_weight, block_rows, gather: see `NTXent`; the detector is copied for the second direction.

    Example:
        >>> import torch, kinfolk as kf
        >>> loss_fn = kf.CLIPLoss(temperature=0.5)
        >>> round(loss_fn(torch.eye(4), torch.eye(4)).item(), 4)
        0.3408
        >>> round(loss_fn(torch.eye(4), torch.eye(4), group_ids=torch.tensor([0, 0, 0, 1])).item(), 4)
        0.1804
    """

    def __init__(
        self,
        temperature: float = 0.07,
        learnable: bool = True,
        min_temperature: float = 0.01,
        **shared: Unpack[Estimate],
    ) -> None:
        def make(each: Detector | None) -> NTXent:
            given: Estimate = {**shared, "detector": each}
            return NTXent(temperature, **given)

        super().__init__(make, shared.get("detector"), LearnedTemperature(temperature, min_temperature) if learnable else None)

    def __repr__(self) -> str:
        learned = {"learnable": False} if self.learned is None else {"min_temperature": self.learned.lowest}
        return call("CLIPLoss", self.image, temperature=self.image.temperature, **learned)
