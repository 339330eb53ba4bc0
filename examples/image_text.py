"""Image and text in a plain PyTorch loop: FastCLIP with learned thresholds on made-up images with
two captions each.

Run: python examples/image_text.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import kinfolk as kf

NUM_IMAGES, CAPTIONS, WORDS, LENGTH = 256, 2, 64, 6


def made_up() -> tuple[Tensor, Tensor]:
    """(N, 48) images and (N, 6) captions of N samples: each image shows three of 64 things, its
    captions name them among others."""
    things = torch.randint(WORDS, (NUM_IMAGES, 3)).repeat_interleave(CAPTIONS, 0)
    images = torch.randn(WORDS, 48)[things].sum(1)
    return images, torch.cat((things, torch.randint(WORDS, (len(things), LENGTH - 3))), 1)


def main() -> None:
    torch.manual_seed(0)
    images, captions = made_up()
    num_samples, num_epochs, batch_size = len(images), 6, 64
    # captions of one image are never each other's negatives
    group_ids = torch.arange(num_samples) // CAPTIONS

    image_tower = nn.Sequential(nn.Linear(48, 128), nn.ReLU(), nn.Linear(128, 32))
    text_tower = nn.Sequential(nn.EmbeddingBag(WORDS, 128), nn.ReLU(), nn.Linear(128, 32))
    detector = kf.StartAt(kf.GloFND(num_samples=num_samples, alpha=0.01, init="quantile"), epoch=2)
    loss_fn = kf.FastCLIPLoss(
        num_samples=num_samples, temperature=0.1, rho=2.0, decay_epochs=3, detector=detector
    )
    towers = [*image_tower.parameters(), *text_tower.parameters()]
    temperature = {"params": loss_fn.temperature_parameters(), "lr": 2e-3, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([{"params": towers, "lr": 3e-3}, temperature])
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda step: 1.0, lambda step: loss_fn.temperature_lr_factor]
    )

    for epoch in range(num_epochs):
        loss_fn.set_progress(epoch, num_epochs)
        total = 0.0
        for ids in torch.split(torch.randperm(num_samples), batch_size):
            image_z, text_z = (
                image_tower(images[ids] + 0.1 * torch.randn(len(ids), 48)),
                text_tower(captions[ids]),
            )
            loss = loss_fn(image_z, text_z, ids, group_ids[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() * len(ids) / num_samples
        print(
            f"epoch {epoch}  loss {total:.3f}  temperature {loss_fn.current_temperature:.3f} "
            f" flagged {loss_fn.stats.share:.3f}"
        )


if __name__ == "__main__":
    main()
