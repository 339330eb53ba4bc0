"""Finds pairs of images that are the same up to size, compression, a slight crop and mirroring.

Both images lose their uniform borders and are reduced to small grey thumbnails without their low
frequencies, so that a shared background does not count. Crops of one are compared with the other;
the best is refined step by step. They are copies if they correlate (`COPY`) as a whole and in
nearly every part that has structure (`PARTS`).

Dimension key: N data set, K nearest, M pairs, P pairs of a block, S side of a thumbnail, B parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from kinfolk.errors import show_progress
from kinfolk.features import Ints

if TYPE_CHECKING:
    from kinfolk.data.images import ImageData


SIDE = 32
COPY, PARTS = 0.85, 0.5
"""Correlation of whole images, and of nearly all their parts, from which two images are copies."""
_UNIFORM, _HARD, _LEAST, _STRUCTURE = 0.06, 0.1, 0.3, 0.02
"""Range of grey in a uniform border, its mean difference from what it borders on, share of a side
that is kept at least, and deviation of a part with structure."""
_PLAUSIBLE, _PROMISING = 0.6, 0.55
"""Correlation of whole thumbnails from which crops are tried, and of the best crop from which it is
refined."""
_SCALES = (1.0, 0.95, 0.9, 0.84)
_BLUR = 9
_PAIRS, _IMAGES = 512, 1024
_STEPS = (0.04, 0.02, 0.01)
CANDIDATES = 4
"""Number of nearest neighbours whose pixels are compared."""
SEARCH_UP_TO = 20_000
"""Number of images up to which the most similar thumbnails are candidates too."""


def find_copies(images: ImageData, near_NK: Ints, progress: bool = False) -> NDArray[np.int64]:
    """(M, 2) pairs of copies among each sample's nearest neighbours in the features and, up to
    `SEARCH_UP_TO` images, the most similar thumbnails."""
    small = thumbnails(images, len(near_NK))
    row_M, rank_M = np.nonzero(near_NK[:, :CANDIDATES] >= 0)
    pairs = [np.stack([row_M, near_NK[row_M, rank_M]], 1)]
    if len(near_NK) <= SEARCH_UP_TO:
        pairs.append(similar_thumbnails(small))
    pairs_M2 = np.unique(np.sort(np.concatenate(pairs), axis=1), axis=0)
    copies_M = np.zeros(len(pairs_M2), dtype=np.bool_)
    starts = range(0, len(pairs_M2), _PAIRS)
    for start in show_progress(starts, len(starts), "Comparing pixels", enabled=progress):
        one, other = small[pairs_M2[start : start + _PAIRS].T]
        same = (correlation(one, other) >= COPY) | (correlation(one.flip(3), other) >= COPY)
        copies_M[start : start + len(one)] = same.numpy()
    copies_M2: NDArray[np.int64] = pairs_M2[copies_M]
    return copies_M2


def thumbnails(images: ImageData, number: int) -> Tensor:
    """(N, 1, S, S) grey square thumbnails of the first samples without uniform borders, in [0,
    1]."""
    found = torch.empty(number, 1, SIDE, SIDE)
    for start in range(0, number, _IMAGES):
        ids = torch.arange(start, min(number, start + _IMAGES))
        grey = images.pixels(ids).permute(0, 3, 1, 2).float().div_(255).mean(1, keepdim=True)
        found[start : start + len(ids)] = F.interpolate(grey, size=(SIDE, SIDE), mode="area")
        top, bottom = _uniform_edges(grey[:, 0])
        left, right = _uniform_edges(grey[:, 0].transpose(1, 2))
        framed = (bottom - top < grey.shape[2]) | (right - left < grey.shape[3])
        for row in framed.nonzero()[:, 0].tolist():
            content = grey[row : row + 1, :, top[row] : bottom[row], left[row] : right[row]]
            found[start + row] = F.interpolate(content, size=(SIDE, SIDE), mode="area")[0]
    return found


def _uniform_edges(grey_BHW: Tensor) -> tuple[Tensor, Tensor]:
    """(B,), (B,) the rows between the uniform borders; all rows if too few are left."""
    height = grey_BHW.shape[1]
    first_B, last_B = _border(grey_BHW), height - _border(grey_BHW.flip(1))
    enough = last_B - first_B >= _LEAST * height
    return torch.where(enough, first_B, 0), torch.where(enough, last_B, height)


def _border(grey_BHW: Tensor) -> Tensor:
    """(B,) rows of one colour at the top, with the blurred row below; zero where they fade, as a
    sky does."""
    low_BH, high_BH = grey_BHW.amin(2), grey_BHW.amax(2)
    range_BH = torch.maximum(high_BH - low_BH[:, :1], high_BH[:, :1] - low_BH)
    border_B = (range_BH < _UNIFORM).long().cumprod(1).sum(1)
    below_B1 = (border_B + 1).clamp(max=range_BH.shape[1] - 1).unsqueeze(1)
    jump_BH = (grey_BHW - grey_BHW[:, :1].mean(2, keepdim=True)).abs().mean(2)
    ends = (border_B > 0) & (jump_BH.gather(1, below_B1)[:, 0] >= _HARD)
    return torch.where(ends, border_B + 1, 0)


def similar_thumbnails(thumbnails_N1SS: Tensor, number: int = 3) -> NDArray[np.int64]:
    """(P, 2) each image with the most similar ones, also mirrored."""
    whole_ND, mirrored_ND = _rough(thumbnails_N1SS), _rough(thumbnails_N1SS.flip(3))
    pairs = []
    for start in range(0, len(whole_ND), _IMAGES):
        part = whole_ND[start : start + _IMAGES]
        sim = torch.maximum(part @ whole_ND.T, part @ mirrored_ND.T)
        sim.diagonal(start).fill_(-2)
        near = sim.topk(min(number, len(whole_ND) - 1), dim=1).indices
        rows = start + torch.arange(len(part)).repeat_interleave(near.shape[1])
        pairs.append(torch.stack([rows, near.reshape(-1)], 1))
    return torch.cat(pairs).numpy().astype(np.int64)


def correlation(one_P1SS: Tensor, other_P1SS: Tensor) -> Tensor:
    """(P,) the highest correlation of one image with a crop of the other, in either direction; −1
    where they differ clearly."""
    found_P = torch.full((len(one_P1SS),), -1.0)
    for cropped, whole in ((one_P1SS, other_P1SS), (other_P1SS, one_P1SS)):
        plausible = ((_rough(cropped) * _rough(whole)).sum(1) >= _PLAUSIBLE).nonzero()[:, 0]
        if len(plausible):
            found_P[plausible] = torch.maximum(
                found_P[plausible], _best_crop(cropped[plausible], whole[plausible])
            )
    return found_P


def _best_crop(cropped_P1SS: Tensor, whole_P1SS: Tensor) -> Tensor:
    whole_PD = _normalise(_without_low_frequencies(whole_P1SS))
    best_P, crop_P4 = torch.full((len(whole_PD),), -1.0), torch.zeros(len(whole_PD), 4)
    for scale in _SCALES:
        shifts = (0.0,) if scale == 1 else (scale - 1, 0.0, 1 - scale)
        for x in shifts:
            for y in shifts:
                crop = torch.tensor([scale, scale, x, y])
                _keep_better(cropped_P1SS, whole_PD, crop.expand(len(whole_PD), 4), best_P, crop_P4)
    promising = (best_P >= _PROMISING).nonzero()[:, 0]
    if len(promising):
        images, whole = cropped_P1SS[promising], whole_PD[promising]
        best, crop = best_P[promising], crop_P4[promising]
        for step in _STEPS:
            for place in (0, 1, 2, 3, 0, 1, 2, 3):
                for sign in (-1, 1):
                    moved = crop.clone()
                    moved[:, place] += sign * step
                    moved[:, :2].clamp_(0.75, 1)
                    _keep_better(images, whole, moved, best, crop)
        same = _parts_agree(_crop(images, crop), whole_P1SS[promising])
        best_P[promising] = torch.where(same, best, -1.0)
    return best_P


def _parts_agree(one_P1SS: Tensor, other_P1SS: Tensor) -> Tensor:
    """(P,) True where the images correlate in nearly all parts in which one of them has
    structure."""
    parts = (_unfold(one_P1SS), _unfold(other_P1SS))
    one_PBD, other_PBD = (part_PBD - part_PBD.mean(2, keepdim=True) for part_PBD in parts)
    norms_PB = one_PBD.norm(dim=2) * other_PBD.norm(dim=2)
    agree_PB = (one_PBD * other_PBD).sum(2) / norms_PB.clamp_min(1e-6) >= PARTS
    structured_PB = torch.maximum(one_PBD.std(2), other_PBD.std(2)) >= _STRUCTURE
    differ_P = (structured_PB & ~agree_PB).sum(1)
    agrees_P: Tensor = 8 * differ_P <= structured_PB.sum(1)
    return agrees_P


def _unfold(images_P1SS: Tensor) -> Tensor:
    """(P, B, D) the parts without their low frequencies."""
    detail = _without_low_frequencies(images_P1SS)
    return F.unfold(detail, SIDE // 4, stride=SIDE // 4).transpose(1, 2)


def _keep_better(
    images_P1SS: Tensor, whole_PD: Tensor, crop_P4: Tensor, best_P: Tensor, best_crop_P4: Tensor
) -> None:
    """Tries one crop (scale and shift along x and y) of each image, and keeps it where it is
    better."""
    detail_P1SS = _without_low_frequencies(_crop(images_P1SS, crop_P4))
    value_P = (_normalise(detail_P1SS) * whole_PD).sum(1)
    better = value_P > best_P
    best_P[better], best_crop_P4[better] = value_P[better], crop_P4[better]


def _crop(images_P1SS: Tensor, crop_P4: Tensor) -> Tensor:
    matrix = torch.zeros(len(crop_P4), 2, 3)
    matrix[:, 0, 0], matrix[:, 1, 1], matrix[:, 0, 2], matrix[:, 1, 2] = crop_P4.unbind(1)
    grid = F.affine_grid(matrix, list(images_P1SS.shape), align_corners=False)
    return F.grid_sample(images_P1SS, grid, padding_mode="border", align_corners=False)


def _rough(images_P1SS: Tensor) -> Tensor:
    """(P, D) a coarse version that a slight crop changes little."""
    return _normalise(F.avg_pool2d(images_P1SS, 4))


def _without_low_frequencies(images_P1SS: Tensor) -> Tensor:
    padded = F.pad(images_P1SS, (_BLUR // 2,) * 4, mode="replicate")
    return images_P1SS - F.avg_pool2d(padded, _BLUR, 1)


def _normalise(images: Tensor) -> Tensor:
    """(P, D) with mean zero and unit norm; an image without structure becomes zero."""
    flat = images.flatten(1)
    flat = flat - flat.mean(1, keepdim=True)
    norm = flat.norm(dim=1, keepdim=True)
    return torch.where(norm > 1e-3, flat / norm.clamp_min(1e-6), 0.0)
