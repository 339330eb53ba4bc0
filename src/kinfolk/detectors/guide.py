"""A guide: another model's features say which candidates are kin, or to what degree.

Solatorio, GISTEmbed, 2024, section 3 (a guide filters negatives that are closer than the positive, here by a margin); Sobal et al., X-CLR,
2024, equation 3 (similarities of another model as soft targets); for images with captions Gao et al., SoftCLIP, AAAI 2024.

Dimension key: R rows of a block, C candidates, b samples of a block, N data set, F features of the guide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.detectors.base import Detector, Found
from kinfolk.errors import KinfolkError, UsageError
from kinfolk.files import check_safetensors, first_line
from kinfolk.kinship import Mask, Roles, greater
from kinfolk.pairs import LEFT_OUT, Block
from kinfolk.stores.per_sample import check_ids

KEYS = ("features", "embeddings", "embedding", "x")
"""Names that are looked for first in a .safetensors file that holds several tensors."""


class Guide(Detector):
    """Kin are the candidates that a guide, a frozen model of any kind, finds similar to the anchor's sample.

        s_ij = cosine similarity of the guide's features of the samples i and j
        alpha         kin: the share α of the anchor's negatives with the highest s_ij
        margin        kin: s_ij > 1 − margin; 1 is the guide's similarity of a sample to its own other view
        temperature   every candidate is kin, with the degree exp((s_ij − 1) / t_g)

    With degrees and `attract`, own positive and candidates share the pull as softmax(s_ij / t_g), the own positive with s = 1: X-CLR's
    targets. The features are only read. On a CPU the file stays mapped into memory, so that a step reads only the batch's rows; on an
    accelerator they move there, in the precision of the file. No state: features are data, so they are not in `state_dict()`.

    Without features, a framework of images and captions takes the candidates' own modality as the guide: an image's candidate captions are
    compared with its own caption, a caption's candidate images with its own image.

    Args:
        features: (N, F) in data-set order, any norm; or a .npy or .safetensors file of them, such as the output of `kinfolk embed`.
        alpha: α in (0, 1); at least one candidate is kin.
        margin: in [0, 2].
        temperature: t_g > 0. Exactly one of the three is given.
        num_samples: N, which the features must match.

    Example:
        >>> import torch, kinfolk as kf
        >>> features = torch.eye(2)[torch.tensor([0, 1, 0])]
        >>> loss_fn = kf.NTXent(temperature=0.1, detector=kf.Guide(features, margin=0.5), action="attract")
        >>> loss_fn(torch.eye(3), torch.eye(3), torch.arange(3)).isfinite().item()
        True
    """

    paper: ClassVar[str] = "Solatorio, 2024; Sobal et al., 2024"
    needs: ClassVar[str] = "features (--guide FILE)"

    def __init__(
        self,
        features: str | Path | Tensor | None = None,
        alpha: float | None = None,
        margin: float | None = None,
        temperature: float | None = None,
        num_samples: int | None = None,
    ) -> None:
        super().__init__()
        if sum(value is not None for value in (alpha, margin, temperature)) != 1:
            raise ValueError(f"exactly one of `alpha` (={alpha}), `margin` (={margin}) and `temperature` (={temperature}) must be given")
        if alpha is not None and not 0 < alpha < 1:
            raise ValueError(f"`alpha` (={alpha}) must be in (0, 1)")
        if margin is not None and not 0 <= margin <= 2:
            raise ValueError(f"`margin` (={margin}) must be in [0, 2]")
        if temperature is not None and not 0 < temperature < math.inf:
            raise ValueError(f"`temperature` (={temperature}) must be above 0")
        self.alpha, self.margin, self.temperature = alpha, margin, temperature
        self.source = None if isinstance(features, Tensor) else features
        self.features: Tensor | None
        self.register_buffer("features", None if features is None else _checked(features, num_samples), persistent=False)

    @classmethod
    def usual(cls, given: Mapping[str, object]) -> Mapping[str, object]:
        return {} if any(given.get(name) is not None for name in ("alpha", "margin", "temperature")) else {"alpha": 0.01}

    @property
    def addresses(self) -> bool:  # type: ignore[override]
        return self.features is not None

    @property
    def reads(self) -> str | None:  # type: ignore[override]
        return "modality" if self.features is None else None

    @property
    def soft(self) -> bool:  # type: ignore[override]
        return self.temperature is not None

    @torch.no_grad()
    def find(self, block: Block) -> Found:
        sim_RC = self._similarities(block)
        if self.temperature is not None:
            return Found((Roles(kin=Mask(torch.ones_like(sim_RC), ((sim_RC - 1) / self.temperature).clamp(max=0).exp())),))
        level_R1 = torch.full_like(sim_RC[:, :1], 1 - self.margin) if self.margin is not None else self._quantile(sim_RC, block)
        return Found((Roles(kin=Mask(greater(sim_RC, level_R1))),))

    def _similarities(self, block: Block) -> Tensor:
        """(R, C) of the guide; `LEFT_OUT` at the anchor's own."""
        if self.features is None:
            if block.guide_bG is None or block.guide_CG is None:
                raise ValueError("the guide needs `features`: only losses of image and text can do without")
            rows_bF, candidates_CF = block.guide_bG, block.guide_CG
        else:
            rows_bF, candidates_CF = (self._read(ids, block.sim_RC.dtype) for ids in (block.ids, block.candidate_ids))
        sim_bC = rows_bF @ candidates_CF.T
        sim_RC = sim_bC if block.num_views == 1 else sim_bC.repeat_interleave(block.num_views, 0)
        return sim_RC.masked_fill(block.sim_RC < -2, LEFT_OUT)

    def _read(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """(b, F) unit-norm features of samples."""
        assert self.features is not None
        check_ids(ids, len(self.features), "the guide has features of that many samples")
        return F.normalize(self.features[ids].to(dtype), dim=1)

    def _quantile(self, sim_RC: Tensor, block: Block) -> Tensor:
        """(R, 1) just below the k-th highest similarity, k = round(α n), at least 1."""
        assert self.alpha is not None
        most = max(1, round(sim_RC.shape[1] * self.alpha))  # n is at most C
        k_R1 = (block.num_negatives_R.double() * self.alpha).round().long().clamp(1, most).unsqueeze(1)
        level_R1 = sim_RC.topk(most, dim=1, sorted=True).values.gather(1, k_R1 - 1)
        return level_R1 - 8 * torch.finfo(sim_RC.dtype).eps

    def __deepcopy__(self, memo: dict[int, Any]) -> Guide:
        """The features are shared, as they are only read."""
        twin = Guide(self.features, self.alpha, self.margin, self.temperature)
        twin.source = self.source
        twin.train(self.training)
        twin.set_progress(self.epoch, self.num_epochs)
        return twin

    def __repr__(self) -> str:
        given = {"alpha": self.alpha, "margin": self.margin, "temperature": self.temperature}
        shown = [f"{name}={value}" for name, value in given.items() if value is not None]
        return f"Guide({', '.join([f'<{len(self.features):,} features>', *shown] if self.features is not None else shown)})"


def _checked(features: str | Path | Tensor, num_samples: int | None) -> Tensor:
    name = "`features`" if isinstance(features, Tensor) else f"`{features}`"
    features_NF = features if isinstance(features, Tensor) else read_features(features)
    if features_NF.ndim != 2 or not features_NF.is_floating_point() or not features_NF.shape[1]:
        raise ValueError(f"{name} (={features_NF.dtype}, shape {tuple(features_NF.shape)}) must be floats of the shape (samples, features)")
    if num_samples is not None and len(features_NF) != num_samples:
        raise ValueError(
            f"{name} (={len(features_NF):,} rows) must hold one row for each of the {num_samples:,} training samples, in data-set order"
        )
    return features_NF.detach()


def read_features(path: str | Path) -> Tensor:
    """(N, F) of a .npy or .safetensors file, mapped into memory; nothing in it is run, and the file is not written."""
    path = Path(path)
    if not path.is_file():
        raise UsageError(
            f"there is no file `{path}` of a guide's features; write one with `kinfolk embed`, or give a run folder or timm/NAME"
        )
    try:
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
        import numpy as np

        return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))  # a private map: no write would reach the file
    except KinfolkError:
        raise
    except Exception as error:  # readers raise nearly anything on a broken file
        raise KinfolkError(f"`{path}` is not a readable .npy or .safetensors file of a guide's features ({first_line(error)})") from error


def _read_safetensors(path: Path) -> Tensor:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        check_safetensors(path, file.metadata() or {})
        names = sorted(file.keys())
        chosen = next((key for key in KEYS if key in names), names[0] if len(names) == 1 else None)
        if chosen is None:
            raise UsageError(
                f"`{path}` must hold one tensor, or one named {' or '.join(KEYS[:2])}; it holds {', '.join(names) or 'nothing'}"
            )
        tensor: Tensor = file.get_tensor(chosen)
        return tensor
