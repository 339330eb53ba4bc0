"""A plain PyTorch loop: SogCLR on scikit-learn's digits, with a learned threshold for each sample.

Run: python examples/plain_pytorch.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import kinfolk as kf


def view(pixels: Tensor) -> Tensor:
    """A random view of 8x8 images: shifted by up to one pixel, with noise."""
    across, down = torch.randint(-1, 2, (2,)).tolist()
    return pixels.roll((down, across), (1, 2)) + 0.2 * torch.randn_like(pixels)


def main() -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).view(-1, 8, 8) / 16
    num_samples, num_epochs, batch_size = len(pixels), 8, 128

    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    detector = kf.StartAt(kf.GloFND(num_samples=num_samples, alpha=0.05, init="quantile"), epoch=2)
    loss_fn = kf.SogCLRLoss(num_samples=num_samples, temperature=0.2, detector=detector)
    # only for the figures below: training needs no labels
    loss_fn.set_eval_labels(torch.tensor(labels))
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-3)

    for epoch in range(num_epochs):
        loss_fn.set_progress(epoch, num_epochs)
        total = 0.0
        for ids in torch.split(torch.randperm(num_samples), batch_size)[:-1]:
            loss = loss_fn(encoder(view(pixels[ids])), encoder(view(pixels[ids])), ids)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        stats = loss_fn.stats
        print(
            f"epoch {epoch}  loss {total / (num_samples // batch_size):.3f}  flagged"
            f" {stats.share:.3f}  precision {stats.precision:.2f}"
        )


if __name__ == "__main__":
    main()
