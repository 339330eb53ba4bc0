"""Splitting a cluster by density peaks: Rodriguez and Laio, Science 2014, on the units of a cluster.

    ρ_i = Σ_j exp(−d_ij² / d_c²),   δ_i = min over denser j of d_ij (the densest: the largest d_ij),   γ_i = ρ_i δ_i

The m − 1 units of largest γ and, of the others, the one of largest δ are prototypes; every unit goes to one of them. γ finds groups, but
never a single stray unit; tried as a prototype, it is merged back where it is not astray. d is the distance of the unit-norm centres and
d_c² the mean of d² in the cluster: a share of the neighbours, as in the paper, says nothing among a few dozen units.

Dimension key: K clusters, W units of each (padded), D embedding, m parts.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from kinfolk.clustering.propagation import propagate

Rule = Literal["centres", "propagation"]
RULES: tuple[Rule, ...] = get_args(Rule)


def split(centre_KWD: Tensor, valid_KW: Tensor, rest_K: Tensor, parts: int, rule: Rule) -> Tensor:
    """(K, W) the part, below `parts`, of every unit; what it says of invalid places is of no meaning.

    Args:
        centre_KWD: unit-norm centres of the units.
        valid_KW: which places hold a unit.
        rest_K: where True, place 0 stands for all units that are not looked at: the densest one, always a prototype.
        parts: m, the most parts there may be.
        rule: "centres": to the most similar prototype; "propagation": to the prototype whose label reaches it most.
    """
    sim_KWW = centre_KWD @ centre_KWD.mT
    proto_Km, known_Km = peaks(sim_KWW, valid_KW, rest_K, parts)
    if rule == "centres":
        near_KmW = sim_KWW.gather(1, proto_Km.unsqueeze(2).expand(-1, -1, sim_KWW.shape[2]))
    else:
        near_KmW = propagate(sim_KWW, valid_KW, proto_Km)
    return near_KmW.masked_fill(~known_Km.unsqueeze(2), -torch.inf).argmax(1)


def peaks(sim_KWW: Tensor, valid_KW: Tensor, rest_K: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """(K, m) places of the prototypes and (K, m) which of them there are. Of equals the earlier place wins."""
    both_KWW = valid_KW.unsqueeze(2) & valid_KW.unsqueeze(1)
    # Symmetric, and 0 where it is nothing but rounding: which of two units is the denser must not depend on the last bit.
    square_KWW = 2 - (sim_KWW + sim_KWW.mT)
    square_KWW = square_KWW.masked_fill(~both_KWW | (square_KWW < 64 * torch.finfo(sim_KWW.dtype).eps), 0)
    number_K = valid_KW.sum(1)
    scale_K = square_KWW.sum((1, 2)) / (number_K * (number_K - 1)).clamp(min=1)
    scale_K = torch.where(scale_K > 0, scale_K, 1.0)
    rho_KW = (-square_KWW / scale_K.view(-1, 1, 1)).exp().masked_fill(~both_KWW, 0).sum(2)
    rho_KW[:, 0] = torch.where(rest_K, torch.inf, rho_KW[:, 0])
    place_W = torch.arange(valid_KW.shape[1], device=sim_KWW.device)
    denser_KWW = (rho_KW.unsqueeze(1) > rho_KW.unsqueeze(2)) | (
        (rho_KW.unsqueeze(1) == rho_KW.unsqueeze(2)) & (place_W.view(1, 1, -1) < place_W.view(1, -1, 1))
    )
    nearest_KW = square_KWW.masked_fill(~(denser_KWW & both_KWW), torch.inf).amin(2)
    delta_KW = torch.where(nearest_KW.isinf(), square_KWW.amax(2), nearest_KW).sqrt()
    gamma_KW = (rho_KW * delta_KW).masked_fill(~valid_KW, -1)
    gamma_KW[:, 0] = torch.where(rest_K, torch.inf, gamma_KW[:, 0])
    by_peak_Km = gamma_KW.argsort(dim=1, descending=True, stable=True)[:, : parts - 1]
    left_KW = delta_KW.masked_fill(~valid_KW, -1).scatter(1, by_peak_Km, -1)
    far_K1 = left_KW.argmax(1, keepdim=True)
    known_Km = torch.cat((gamma_KW.gather(1, by_peak_Km), left_KW.gather(1, far_K1)), 1) >= 0
    return torch.cat((by_peak_Km, far_K1), 1), known_Km
