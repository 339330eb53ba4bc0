"""SigLIP: Zhai et al., Sigmoid Loss for Language Image Pre-Training, ICCV 2023, equation 1.

Dimension key: B batch, A anchors (images of this rank), C candidates (texts of all ranks), D embedding, R rows of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from kinfolk import distributed
from kinfolk.contrast import Contrast, Rows, Terms, refuse_second_derivative
from kinfolk.detectors.base import guidance_of
from kinfolk.kinship import Roles, select
from kinfolk.objectives.base import Objective, Shared, call, unit
from kinfolk.objectives.bimodal import LearnedTemperature, check_inputs, known
from kinfolk.pairs import LEFT_OUT, Block, Pairs
from kinfolk.stats import Stats, count, summed

_BLOCK_ELEMENTS = {"cpu": 1 << 21, "default": 1 << 26}


class SigLIPLoss(Objective):
    """Each pair of an image and a text is judged by itself, as belonging together or not: a sigmoid, no softmax.

        loss = −(1 / B) Σ_ij w_ij log σ( y_ij (s_ij / t + b) ),     y_ij = 1 where j is the text of i or shares its group, else −1

    t and b are learned. w_ij is 1; for kin 0 with `eliminate`, 1 − degree or `kin_weight` with `reweight`. With `attract` kin are positives
    to their degree d: −d log σ(s / t + b) − (1 − d) log σ(−s / t − b). As no negative depends on the others, none has to be kept:
    `min_negatives` has no effect. The detector sees images as anchors and texts as candidates. State: t, b and the detector's.

    Args:
        temperature: t at the start; 0.1 as in the paper.
        bias: b at the start; −10 as in the paper, so that the many negatives do not dominate the first steps.
        learnable: False keeps both.
        min_temperature: the learned t never falls below.
        detector, action, kin_weight, block_rows, gather: see `Objective`.

    Example:
        >>> import torch, kinfolk as kf
        >>> loss_fn = kf.SigLIPLoss(temperature=0.5, bias=-1.0)
        >>> round(loss_fn(torch.eye(4), torch.eye(4)).item(), 4)
        1.253
    """

    attracted_stay: ClassVar[bool] = True
    shares_pull: ClassVar[bool] = False
    refused: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("prior", "hardness", "decoupled"), "each pair is judged by itself, so there is no sum over negatives to estimate"
    )

    def __init__(
        self,
        temperature: float = 0.1,
        bias: float = -10.0,
        learnable: bool = True,
        min_temperature: float = 0.001,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(temperature, **shared)
        self.learned = LearnedTemperature(temperature, min_temperature)
        self.initial_bias = bias
        self.bias = nn.Parameter(torch.tensor(float(bias)))
        self.learnable = learnable
        if not learnable:
            self.learned.requires_grad_(False)
            self.bias.requires_grad_(False)

    def forward(self, image_features: Tensor, text_features: Tensor, ids: Tensor | None = None, group_ids: Tensor | None = None) -> Tensor:
        """Scalar: the mean over the images of all ranks; see `Bimodal.forward` for the arguments."""
        if torch.compiler.is_compiling():
            outside: Tensor = torch.compiler.disable(self.forward)(  # type: ignore[no-untyped-call]
                image_features, text_features, ids, group_ids
            )
            return outside
        check_inputs(image_features, text_features, ids, group_ids)
        device = image_features.device
        ids = self.numbered(image_features) if ids is None else ids.to(device, torch.int64)
        groups = self.groups[ids] if group_ids is None and self.groups is not None else group_ids
        keys = ids if groups is None else known(ids, groups.to(device, torch.int64))
        images, texts = unit(image_features), unit(text_features)
        guide = texts.detach() if guidance_of(self.detector).reads == "modality" else None
        pairs = Pairs(images, texts, texts.unsqueeze(1), ids, ids, groups=keys, candidate_groups=keys, unit=True, local_candidates=True)
        pairs = pairs if guide is None else Pairs(**{**vars(pairs), "guide": guide, "candidate_guide": guide})
        joined, sizes, all_ids = self._joined(pairs)
        work = _Work(self, joined, sizes, all_ids)
        with torch.autocast(device.type, enabled=False):
            temperature, bias = self.learned().to(images.dtype), distributed.averaged(self.bias).to(images.dtype)
            loss: Tensor = _Sigmoid.apply(joined.anchors, joined.candidates, temperature, bias, work)  # type: ignore[no-untyped-call]
        loss = loss if sizes is None else distributed.sum_over_ranks(loss)
        self.finish(cast(Contrast, work), loss)
        return loss

    @property
    def present_temperature(self) -> float:
        """t, as it is now."""
        return float(torch.exp(-self.learned.logit_scale.detach().float()).clamp(self.learned.lowest, self.learned.highest))

    def terms(self, rows: Rows) -> Terms:
        raise NotImplementedError("a sigmoid loss has no terms of rows; call it with images and texts")

    def __repr__(self) -> str:
        learned = {} if self.learnable else {"learnable": False}
        return call("SigLIPLoss", self, temperature=self.temperature, bias=self.initial_bias, **learned)


class _Work:
    """One evaluation of the loss: gradient and counts block by block, with what `Objective.finish` asks of a contrast."""

    def __init__(self, objective: SigLIPLoss, pairs: Pairs, sizes: list[int] | None, all_ids: Tensor | None) -> None:
        self.objective, self.pairs, self.sizes, self.all_ids = objective, pairs, sizes, all_ids
        self.found: list[Mapping[str, Tensor]] = []
        self.updates: list[list[Mapping[str, Tensor]]] = []
        self.stats: partial[Stats]

    def run(self, anchors_AD: Tensor, candidates_CD: Tensor, t: Tensor, b: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The loss summed over this rank's images and divided by all ranks', and its gradient by the four inputs."""
        objective, pairs = self.objective, self.pairs
        assert pairs.groups is not None
        assert pairs.candidate_groups is not None
        number = len(anchors_AD) if self.sizes is None else sum(self.sizes)
        limit = _BLOCK_ELEMENTS.get(anchors_AD.device.type, _BLOCK_ELEMENTS["default"])
        step = max(1, objective.block_rows or limit // max(1, len(candidates_CD)))
        labels = objective.judging_labels(anchors_AD.device)
        total, by_anchor, counts = anchors_AD.new_zeros(()), list[Tensor](), list[Any]()
        by_candidate, by_t, by_b = torch.zeros_like(candidates_CD), anchors_AD.new_zeros(()), anchors_AD.new_zeros(())
        for start in range(0, len(anchors_AD), step):
            rows = slice(start, start + step)
            sim_RC = anchors_AD[rows] @ candidates_CD.T
            own_RC = pairs.groups[rows].unsqueeze(1) == pairs.candidate_groups
            guide = None if pairs.guide is None else pairs.guide[rows]
            seen_RC, others_R = sim_RC.masked_fill(own_RC, LEFT_OUT), len(candidates_CD) - own_RC.sum(1, dtype=sim_RC.dtype)
            block = Block(
                seen_RC, pairs.ids[rows], pairs.candidate_ids, 1, others_R, objective.compiles, guide, pairs.candidate_guide, candidates_CD
            )
            found = None if objective.detector is None else objective.detector.find(block)
            levels = (Roles(),) if found is None else found.levels
            logit_RC, d_logit_RC = sim_RC / t + b, torch.zeros_like(sim_RC)
            for roles in levels:
                kin_RC, weight_RC, target_RC = self._judged(seen_RC, own_RC, roles)
                # −y log σ(x) − (1 − y) log σ(−x) = softplus(x) − y x
                total = total + (weight_RC * (F.softplus(logit_RC) - target_RC * logit_RC)).sum() / (number * len(levels))
                d_logit_RC += weight_RC * (torch.sigmoid(logit_RC) - target_RC) / (number * len(levels))
                flagged_R = torch.zeros_like(sim_RC[:, 0]) if kin_RC is None else kin_RC.sum(1)
                alike = None if labels is None else labels.alike(block)
                counts.append(partial(torch.Tensor.detach, count(others_R, flagged_R, kin_RC, alike)))
            by_anchor.append(d_logit_RC @ candidates_CD / t)
            by_candidate.addmm_(d_logit_RC.T, anchors_AD[rows] / t)
            by_t, by_b = by_t - (d_logit_RC * sim_RC).sum() / t**2, by_b + d_logit_RC.sum()
            self.found.append({} if found is None else found.update)
            self.updates.append([{}])
        own_A1 = (anchors_AD * pairs.positives.detach().squeeze(1)).sum(1, keepdim=True)
        self.stats = partial(summed, counts, own_A1)
        return total, (torch.cat(by_anchor), by_candidate, by_t, by_b)

    def _judged(self, sim_RC: Tensor, own_RC: Tensor, roles: Roles) -> tuple[Tensor | None, Tensor, Tensor]:
        """(R, C) kin, the weight of each pair, and its target: 1 for a positive, 0 for a negative."""
        objective, target_RC = self.objective, own_RC.to(sim_RC.dtype)
        weight_RC = torch.ones_like(sim_RC)
        kin_RC, drop_RC = select(sim_RC, roles)
        if drop_RC is not None:
            weight_RC = weight_RC - drop_RC
        if kin_RC is None:
            return None, weight_RC, target_RC
        assert roles.kin is not None
        degree_RC = kin_RC * roles.kin.degree(sim_RC) if roles.kin.graded else kin_RC
        if objective.action == "attract":
            return kin_RC, weight_RC, target_RC + degree_RC
        if objective.action == "eliminate":
            return kin_RC, weight_RC - kin_RC, target_RC
        return kin_RC, weight_RC - (degree_RC if roles.kin.graded else (1 - objective.kin_weight) * kin_RC), target_RC


class _Sigmoid(torch.autograd.Function):
    """Takes the gradient in the forward pass, where a block of similarities is at hand."""

    @staticmethod
    def forward(ctx: Any, anchors: Tensor, candidates: Tensor, temperature: Tensor, bias: Tensor, work: _Work) -> Tensor:
        total, gradients = work.run(anchors, candidates, temperature, bias)
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        return *(grad * x for x in ctx.saved_tensors), None
