"""Zero-shot classification: a class is what the text tower makes of its name, in several sentences.

Radford et al., ICML 2021, section 3.1: the embeddings of a class's sentences are averaged, and the picture goes to the nearest class.

Dimension key: N images, K classes, S templates, D embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.errors import KinfolkError, UsageError

TEMPLATES = (
    "a photo of a {}.",
    "a photo of the {}.",
    "a picture of a {}.",
    "a photo of a small {}.",
    "a photo of a large {}.",
    "a close-up photo of a {}.",
    "{}",
)


def class_embeddings(embed: Callable[[list[str]], Tensor], classes: Sequence[str], templates: Sequence[str] = TEMPLATES) -> Tensor:
    """(K, D) unit norm: the mean of each class's sentences.

    Args:
        embed: texts → (number, D), unit norm.
        classes: K names.
        templates: sentences with {} for the name.
    """
    if not classes:
        raise UsageError("zero-shot classification needs the names of the classes; give labelled data whose classes have names, or a file")
    for template in templates:
        if "{}" not in template:
            raise UsageError(f"the template {template!r} has no place for the name of a class; write {{}} where it belongs")
    if not templates:
        raise UsageError("zero-shot classification needs at least one template")
    sentences = [template.replace("{}", name.replace("_", " ")) for name in classes for template in templates]
    each_KSD = embed(sentences).view(len(classes), len(templates), -1)
    return F.normalize(each_KSD.mean(1), dim=-1)


def zero_shot(images_ND: Tensor, labels_N: Tensor, classes_KD: Tensor, ks: Sequence[int] = (1, 5)) -> dict[int, float]:
    """The share of images whose class is among the k nearest, by k; images with a label below 0 are left out."""
    known = labels_N >= 0
    images_ND, labels_N = images_ND[known], labels_N[known]
    if not len(labels_N):
        raise UsageError("the data has no labels to measure with")
    if int(labels_N.max()) >= len(classes_KD):
        raise UsageError(f"the data has the label {int(labels_N.max())}, and there are names for {len(classes_KD)} classes only")
    if not (images_ND.isfinite().all() and classes_KD.isfinite().all()):
        raise KinfolkError("the embeddings are not all finite numbers; nothing can be found by them")
    sim_NK = images_ND @ classes_KD.T
    own_N1 = sim_NK.gather(1, labels_N[:, None])
    nearer_N = (sim_NK > own_N1).sum(1)
    equal_N = (sim_NK == own_N1).sum(1)  # itself among them; as near as the own one, by chance before or after it
    return {k: float(((k - nearer_N).double() / equal_N).clamp(0, 1).mean()) for k in ks}


def read_lines(path: str | Path) -> list[str]:
    """The lines of a text file, without empty ones: names of classes, or templates."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} can't be read: {error}") from error
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise UsageError(f"{path} is empty; it must hold one name or template a line")
    return found


def embedder(
    model: Callable[[Tensor], Tensor], encode: Callable[[Sequence[str]], Tensor], batch_size: int = 256
) -> Callable[[list[str]], Tensor]:
    """Texts → embeddings on the CPU, from a tower and a tokenizer."""

    @torch.no_grad()
    def embed(texts: list[str]) -> Tensor:
        tokens = encode(texts)
        return torch.cat([model(tokens[start : start + batch_size]).float().cpu() for start in range(0, len(tokens), batch_size)])

    return embed
