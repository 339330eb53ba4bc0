"""Writes the encoder of a run in a form that other software reads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kinfolk.errors import UsageError
from kinfolk.exporting.onnx import require_onnx
from kinfolk.exporting.target import PACKAGES, network_in
from kinfolk.exporting.write import WRITERS, Encoder
from kinfolk.models.weights import load_encoder

FORMATS = {
    "safetensors": "encoder.safetensors",
    "torchvision": "torchvision.pth",
    "timm": "timm",
    "detectron2": "detectron2.pkl",
    "onnx": "encoder.onnx",
}
"""Each with the name it is written under in `RUN/export/`; timm's is a folder."""


@dataclass(frozen=True)
class Exported:
    """What was written.

    Args:
        path: the file, or for timm the folder.
        format: one of `FORMATS`.
        checked: how it was checked; or why it could not be.
        use: how the target takes it.
    """

    path: Path
    format: str
    checked: str
    use: str


def export(run: str | os.PathLike[str], format: str, out: str | os.PathLike[str] | None = None, *, overwrite: bool = False) -> Exported:
    """Writes the encoder of `run` for other software: weights under the names that it expects, without head and classifier.

    Args:
        run: a run folder, or a `model.safetensors` of one.
        format: "safetensors", "torchvision", "timm", "detectron2" or "onnx".
        out: the file to write, for timm the folder; by default in `RUN/export/`.
        overwrite: whether to replace what is there.
    """
    if format not in FORMATS:
        raise UsageError(f"`format` (={format!r}) must be one of {', '.join(FORMATS)}")
    path = Path(run)
    target = (path if path.is_dir() else path.parent) / "export" / FORMATS[format] if out is None else Path(out)
    if target.exists() and not overwrite:
        raise UsageError(f"{target} exists; give another `out`, or overwrite it")
    if format == "onnx":
        require_onnx()
    module, meta = load_encoder(path)
    encoder = Encoder(module, meta.get("views") or {})
    if format in PACKAGES:
        network_in(format, encoder.config)  # refused before anything is written
    target.parent.mkdir(parents=True, exist_ok=True)
    checked, use = WRITERS[format](encoder, target)
    return Exported(target, format, checked, use)
