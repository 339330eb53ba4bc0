"""Augmentation on the training device: random draws, image transforms, and the presets of the
papers."""
