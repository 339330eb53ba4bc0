"""lightly's transform and projection head with a kinfolk loss in place of lightly's `NTXentLoss`.

Run: pip install lightly; python examples/lightly_loop.py
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import kinfolk as kf

try:
    from lightly.models.modules import SimCLRProjectionHead
    from lightly.transforms import SimCLRTransform
# RuntimeError: a torchvision that does not fit the torch installed
except (ImportError, RuntimeError) as error:
    sys.exit(f"This example needs lightly (`pip install lightly`): {error}")


class Digits(Dataset[tuple[Tensor, Tensor, int]]):
    """Two views of an image, and the sample's id."""

    def __init__(self) -> None:
        self.images = (load_digits().images * 15.9).astype("uint8")[:512]
        self.transform: Any = SimCLRTransform(
            input_size=16, min_scale=0.4, cj_prob=0.0, hf_prob=0.0, gaussian_blur=0.0
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return *self.transform(Image.fromarray(self.images[index]).convert("RGB")), index


def main() -> None:
    torch.manual_seed(0)
    data = Digits()
    backbone = nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, 2, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    model = nn.Sequential(backbone, SimCLRProjectionHead(64, 64, 32))
    loss_fn = kf.NTXentLoss(temperature=0.2, detector=kf.FNC(alpha=0.02))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(3):
        total = 0.0
        for view1, view2, ids in DataLoader(data, batch_size=128, shuffle=True):
            optimizer.zero_grad()
            loss = loss_fn(model(view1), model(view2), ids)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(ids) / len(data)
        print(f"epoch {epoch}  loss {total:.3f}  flagged {loss_fn.stats.share:.3f}")


if __name__ == "__main__":
    main()
