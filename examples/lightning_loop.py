"""A Lightning module with a kinfolk loss: the loss is a submodule, so its state per sample is in
every checkpoint.

Run: python examples/lightning_loop.py
"""

from __future__ import annotations

import logging

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import kinfolk as kf


class Contrast(lightning.LightningModule):
    """SimCLR with the top 2 % of each anchor's candidates left out of its denominator."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)
        )
        self.loss_fn = kf.NTXentLoss(temperature=0.2, detector=kf.FNC(alpha=0.02))

    def on_train_epoch_start(self) -> None:
        self.loss_fn.set_progress(self.current_epoch, self.trainer.max_epochs or 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        pixels, ids = batch
        z1, z2 = (self.encoder(pixels + 0.3 * torch.randn_like(pixels)) for _ in range(2))
        loss: Tensor = self.loss_fn(z1, z2, ids)
        self.log_dict({"loss": loss, "flagged": self.loss_fn.stats.share})
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.encoder.parameters(), lr=1e-3)


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(0, verbose=False)
    images, _ = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).view(-1, 8, 8) / 16
    loader = DataLoader(
        TensorDataset(pixels, torch.arange(len(pixels))),
        batch_size=128,
        shuffle=True,
        drop_last=True,
    )
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Contrast(), loader)
    print(
        f"loss {trainer.callback_metrics['loss']:.3f}  flagged"
        f" {trainer.callback_metrics['flagged']:.3f}"
    )


if __name__ == "__main__":
    main()
