"""What is allowed and probably not meant: told once, as a warning."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from kinfolk.errors import KinfolkWarning


def warn_if_queue_too_large(queue_size: int, num_samples: int) -> None:
    """Warns of a queue that is not smaller than the data set."""
    if queue_size >= num_samples:
        warnings.warn(
            f"`queue_size` (={queue_size}) is not smaller than the data set (={num_samples} samples): the queue then holds several keys of "
            "one sample, some older than an epoch, and each counts as a negative of its own; choose a smaller queue",
            KinfolkWarning,
            stacklevel=3,
        )


def warn_if_warmup_too_long(warmup_epochs: int, num_epochs: int, what: str) -> bool:
    """Warns of a warm-up as long as the training, so that there will be no `what`; whether it did. A training of one epoch is a trial."""
    too_long = warmup_epochs >= num_epochs > 1
    if too_long:
        warnings.warn(
            f"`warmup_epochs` (={warmup_epochs}) is as long as the training (={num_epochs} epochs): there will be no {what}; choose a "
            "shorter warm-up",
            KinfolkWarning,
            stacklevel=3,
        )
    return too_long


def warn_if_silent(method: str, reason: str | None) -> None:
    """Warns of a detector that can flag nothing in this training, so that the method is the framework alone."""
    if reason is not None:
        warnings.warn(f"the detector of {method} will flag nothing in this training: {reason}", KinfolkWarning, stacklevel=3)


def warn_about_dropped_settings(own: str, method: str, dropped: Sequence[str]) -> None:
    """Tells which settings of a recipe do not apply to another method than its own."""
    if dropped:
        settings = ", ".join(f"`{name}`" for name in dropped)
        warnings.warn(f"the recipe is for {own}; for {method} these settings of it are dropped: {settings}", KinfolkWarning, stacklevel=3)
