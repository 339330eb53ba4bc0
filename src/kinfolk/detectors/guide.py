"""A guide: another model's features say which candidates are kin, or to what degree.

Solatorio, GISTEmbed, 2024, section 3 (a guide filters negatives that are closer than the positive, here by a margin); Sobal et al., X-CLR,
2024, equation 3 (similarities of another model as soft targets); for images with captions Gao et al., SoftCLIP, AAAI 2024.

Dimension key: R rows of a block, C candidates, b samples of a block, N data set, F features of the guide.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from kinfolk.detectors.base import Detector, Found, Guidance, Guided
from kinfolk.errors import KinfolkError, UsageError
from kinfolk.files import check_safetensors, first_line
from kinfolk.kinship import Mask, Roles, greater
from kinfolk.pairs import LEFT_OUT, Action, Block
from kinfolk.stores.per_sample import check_ids

KEYS = ("features", "embeddings", "embedding", "x")
"""Names that are looked for first in a .safetensors file that holds several tensors."""


@runtime_checkable
class Array(Protocol):
    """A NumPy array, or what can be made one."""

    def __array__(self) -> Any: ...


class _Candidates(NamedTuple):
    """The candidates of the last step: the tensor of ids that was given and its version, a copy of the ids, and their unit features."""

    given_C: Tensor
    version: int | None
    ids_C: Tensor
    unit_CF: Tensor


class Guide(Detector, Guided):
    """Kin are the candidates that a guide, a frozen model of any kind, finds similar to the anchor's sample.

        s_ij = cosine similarity of the guide's features of the samples i and j
        alpha         kin: the share α of the anchor's negatives with the highest s_ij
        margin        kin: s_ij > 1 − margin; 1 is s⁺, the guide's similarity of a sample to its own other view, so that GISTEmbed's
                      level margin' · s⁺ is 1 − margin with margin = 1 − margin'
        temperature   every candidate is kin, with the degree exp((s_ij − 1) / t_g)

    With degrees and `attract`, own positive and candidates share the pull as softmax(s_ij / t_g), the own positive with s = 1: X-CLR's
    targets. The features are only read. On a CPU the file stays mapped into memory, so that a step reads only the batch's rows; on an
    accelerator they move there, in the precision of the file. No state: features are data, so they are not in `state_dict()`.

    Without features, a framework of images and captions takes the candidates' own modality as the guide: an image's candidate captions are
    compared with its own caption, a caption's candidate images with its own image.

    Args:
        features: (N, F) in data-set order, any norm, a tensor or a NumPy array; or a .npy or .safetensors file of them, such as the output
            of `kinfolk embed`.
        alpha: α in (0, 1); at least one candidate is kin.
        margin: in [0, 2]; the larger, the more candidates are kin.
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
    needs: ClassVar[str] = "—"
    usual_action: ClassVar[Action] = "attract"  # what gained in the study, by far; see docs/results.md

    def __init__(
        self,
        features: str | Path | Tensor | Array | None = None,
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
        self.source = features if isinstance(features, str | Path) else None
        features_NF = None if features is None else _checked(features, num_samples)
        self.features: Tensor | None
        self.norms: Tensor | None
        self.register_buffer("features", features_NF, persistent=False)
        self.register_buffer("norms", None if features_NF is None else _norms(features_NF, _name(features)), persistent=False)
        self._last: _Candidates | None = None

    @classmethod
    def usual(cls, given: Mapping[str, object]) -> Mapping[str, object]:
        return {} if any(given.get(name) is not None for name in ("alpha", "margin", "temperature")) else {"alpha": 0.1}

    @property
    def num_samples(self) -> int | None:  # type: ignore[override]
        return None if self.features is None else len(self.features)

    @property
    def guidance(self) -> Guidance:
        return Guidance(reads="modality" if self.features is None else None, soft=self.temperature is not None)

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
            rows_bF = self._read(block.ids, block.sim_RC.dtype)
            candidates_CF = self._candidates(block.candidate_ids, block.sim_RC.dtype)
        sim_bC = rows_bF @ candidates_CF.T
        sim_RC = sim_bC if block.num_views == 1 else sim_bC.repeat_interleave(block.num_views, 0)
        return sim_RC.masked_fill(block.sim_RC < -2, LEFT_OUT)

    def _read(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """(b, F) unit-norm features of samples."""
        assert self.features is not None
        assert self.norms is not None
        check_ids(ids, len(self.features), "the guide has features of that many samples")
        return self.features[ids].to(dtype).div_(self.norms[ids].to(dtype).unsqueeze(1))

    def _candidates(self, ids_C: Tensor, dtype: torch.dtype) -> Tensor:
        """(C, F) unit-norm features of the candidates: read once for all blocks of a step, and on a CPU only where the candidates differ
        from those of the step before, so that a queue costs no more than what enters it."""
        last, version = self._last, None if ids_C.is_inference() else ids_C._version  # a queue is written in place
        kept = last is not None and last.unit_CF.dtype == dtype and last.unit_CF.device == ids_C.device
        if last is not None and last.unit_CF.is_inference() != torch.is_inference_mode_enabled():
            kept = False  # what inference mode made cannot be written outside of it
        if last is not None and kept and version is not None and last.given_C is ids_C and last.version == version:
            return last.unit_CF
        if last is not None and kept and ids_C.device.type == "cpu" and last.ids_C.shape == ids_C.shape:
            places = (last.ids_C != ids_C).nonzero().squeeze(1)
            if 2 * len(places) < len(ids_C):
                unit_CF, known_C = last.unit_CF, last.ids_C
                new = ids_C[places]
                unit_CF[places] = self._read(new, dtype)
                known_C[places] = new
                self._last = _Candidates(ids_C, version, known_C, unit_CF)
                return unit_CF
        self._last = _Candidates(ids_C, version, ids_C.clone(), self._read(ids_C, dtype))
        return self._last.unit_CF

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}  # a copy of the detector holds nothing of the batch

    def _quantile(self, sim_RC: Tensor, block: Block) -> Tensor:
        """(R, 1) just below the k-th highest similarity, k = round(α n), at least 1."""
        assert self.alpha is not None
        most = max(1, round(sim_RC.shape[1] * self.alpha))  # n is at most C
        k_R1 = (block.num_negatives_R.double() * self.alpha).round().long().clamp(1, most).unsqueeze(1)
        level_R1 = sim_RC.topk(most, dim=1, sorted=True).values.gather(1, k_R1 - 1)
        return level_R1 - 8 * torch.finfo(sim_RC.dtype).eps

    def __deepcopy__(self, memo: dict[int, Any]) -> Guide:
        """The features are shared, as they are only read."""
        twin = Guide(None, self.alpha, self.margin, self.temperature)
        twin.features, twin.norms, twin.source = self.features, self.norms, self.source
        twin.train(self.training)
        twin.set_progress(self.epoch, self.num_epochs)
        return twin

    def __repr__(self) -> str:
        given = {"alpha": self.alpha, "margin": self.margin, "temperature": self.temperature}
        shown = [f"{name}={value}" for name, value in given.items() if value is not None]
        return f"Guide({', '.join([f'<{len(self.features):,} features>', *shown] if self.features is not None else shown)})"


_CHUNK_ELEMENTS = 1 << 24
"""Features that are looked at together when they are opened."""


def _name(features: object) -> str:
    return f"`{features}`" if isinstance(features, str | Path) else "`features`"


def _norms(features_NF: Tensor, name: str) -> Tensor:
    """(N,) the norm of each row, in one pass over the features; refuses rows without a direction."""
    dtype = torch.float32 if features_NF.device.type == "mps" else torch.float64
    step = max(1, _CHUNK_ELEMENTS // features_NF.shape[1])
    parts = [torch.linalg.vector_norm(part_nF.to(dtype), dim=1) for part_nF in features_NF.split(step)]  # type: ignore[no-untyped-call]
    norms_N = torch.cat(parts)
    bad_N = ~((norms_N > 0) & (norms_N < math.inf))
    if bool(bad_N.any()):
        row = int(bad_N.nonzero()[0])
        what = "are all 0" if norms_N[row] == 0 else "are not all finite"
        raise UsageError(
            f"the features of row {row:,} of {name} {what} ({int(bad_N.sum()):,} such rows of {len(norms_N):,}); "
            "compute the guide's features again for these samples"
        )
    return norms_N


def _checked(features: str | Path | Tensor | Array, num_samples: int | None) -> Tensor:
    name = _name(features)
    features_NF = read_features(features) if isinstance(features, str | Path) else _tensor(features)
    if features_NF.ndim != 2 or not features_NF.is_floating_point() or not features_NF.numel():
        raise ValueError(
            f"{name} (={features_NF.dtype}, shape {tuple(features_NF.shape)}) must be floats of the shape (samples, features), "
            "at least one of each"
        )
    if num_samples is not None and len(features_NF) != num_samples:
        raise ValueError(
            f"{name} (={len(features_NF):,} rows) must hold one row for each of the {num_samples:,} training samples, in data-set order"
        )
    return features_NF.detach()


def _tensor(features: object) -> Tensor:
    """A tensor, or an array as one that shares its memory."""
    if isinstance(features, Tensor):
        return features
    if isinstance(features, Array):
        import numpy as np

        array = np.asarray(features)
        if array.dtype.kind == "f" and array.dtype.itemsize <= 8:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # it is only read
                return torch.from_numpy(array)
        raise ValueError(f"`features` (={array.dtype}, shape {array.shape}) must be floats of the shape (samples, features)")
    raise ValueError(f"`features` (={type(features).__name__}) must be a tensor, a NumPy array, or the path of a .npy or .safetensors file")


def read_features(path: str | Path) -> Tensor:
    """(N, F) of a .npy or .safetensors file, mapped into memory; nothing in it is run, and the file is not written."""
    path = Path(path)
    if not path.is_file():
        raise UsageError(
            f"there is no file `{path}` of a guide's features; write one with `kinfolk embed`, or give a run folder, timm/NAME or patches"
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
