"""From pixels and drawn parameters to one normalised view.

Dimension key: B images, C = 3 channels, H × W pixels of the input, S pixels of a side of the output, P = S·S, X blurred images.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinfolk.data import crop
from kinfolk.data.blur import CUT, blur_matrices, blurred, taps_for
from kinfolk.data.colour import recolour
from kinfolk.data.draws import Draws
from kinfolk.data.presets import Augmentation

Triple = tuple[float, ...]


def render(pixels_BHWC: Tensor, how: Augmentation, draws: Draws, mean: Triple, std: Triple, out_BCSS: Tensor) -> None:
    """Crop, flip, blur, colour, solarise and normalise uint8 pixels as drawn; the result is written to `out_BCSS`."""
    image_BCSS = resize(pixels_BHWC, draws.box, out_BCSS.shape[-1], draws.flip, draws, how.kernel)
    mean_BC1 = image_BCSS.mean(dim=(2, 3))[:, :, None] / 255
    normalise(image_BCSS, draws.matrix, torch.bmm(draws.pull, mean_BC1)[:, :, 0], mean, std, out_BCSS)
    if how.solarise > 0:
        chosen = draws.solarise.nonzero()[:, 0]
        out_BCSS[chosen] = solarised(out_BCSS[chosen], how.threshold, mean, std)


def resize(
    pixels_BHWC: Tensor, box_B4: Tensor, size: int, flip_B: Tensor | None = None, draws: Draws | None = None, kernel: float = 0.1
) -> Tensor:
    """The boxes resized to (B, C, S, S), float32 in [0, 255], and blurred where `draws` says so."""
    _, height, width, _ = pixels_BHWC.shape
    chosen_X = box_B4.new_zeros(0, dtype=torch.long) if draws is None else draws.blur.nonzero()[:, 0]
    sigma_X = box_B4.new_ones(0) if draws is None else draws.sigma[chosen_X]
    num_taps = taps_for(kernel, size)

    if pixels_BHWC.device.type == "cpu" and height * width >= crop.LARGE:
        image_BCSS = crop.resample_each(pixels_BHWC, box_B4, size, flip_B)
        for one, sigma, blur_SS in zip(chosen_X.tolist(), sigma_X.tolist(), blur_matrices(sigma_X, size, num_taps), strict=True):
            image_BCSS[one] = blurred(image_BCSS[one], blur_SS, radius=min(num_taps // 2, int(CUT * sigma)))
        return image_BCSS

    rows_BSH = crop.resize_weights(box_B4[:, 0], box_B4[:, 2], height, size)
    columns_BSW = crop.resize_weights(box_B4[:, 1], box_B4[:, 3], width, size, flip_B)
    if len(chosen_X):
        blur_XSS = blur_matrices(sigma_X, size, num_taps)
        rows_BSH[chosen_X] = blur_XSS @ rows_BSH[chosen_X]
        columns_BSW[chosen_X] = blur_XSS @ columns_BSW[chosen_X]
    return crop.resample(pixels_BHWC, rows_BSH, columns_BSW)


def normalise(image_BCSS: Tensor, matrix_BCC: Tensor, offset_BC: Tensor, mean: Triple, std: Triple, out_BCSS: Tensor) -> None:
    """Colour map of values in [0, 255], cut to black and white, `(value - mean) / std`; written to `out_BCSS`."""
    mean_C, std_C = torch.tensor([mean, std], device=image_BCSS.device)
    matrix_BCC = matrix_BCC / (255 * std_C[:, None])
    offset_BC = (offset_BC - mean_C) / std_C
    recolour(image_BCSS.flatten(2), matrix_BCC, offset_BC, out=out_BCSS.view(len(out_BCSS), 3, -1))
    for channel, (middle, spread) in enumerate(zip(mean, std, strict=True)):
        out_BCSS[:, channel].clamp_(-middle / spread, (1 - middle) / spread)


def solarised(image_BCSS: Tensor, threshold: float, mean: Triple, std: Triple) -> Tensor:
    """Values from the threshold on inverted, of normalised images."""
    mean_C11, std_C11 = torch.tensor([mean, std], device=image_BCSS.device)[:, :, None, None]
    inverted = (1 - 2 * mean_C11) / std_C11 - image_BCSS
    return torch.where(image_BCSS >= (threshold - mean_C11) / std_C11, inverted, image_BCSS)
