"""An encoder as ONNX: pictures (B, 3, H, W) as the run's views leave them in, features (B, F) out; B is free."""

from __future__ import annotations

import importlib
import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kinfolk.errors import UsageError
from kinfolk.exporting.verify import unavailable

NEEDS = ("onnx", "onnxscript", "onnxruntime")


def require_onnx() -> None:
    """Refuses to begin where a package is missing."""
    missing = next((why for package in NEEDS if (why := unavailable(package)) is not None), None)
    if missing is not None:
        raise UsageError(f"onnx can't be written: {missing}; install it with `pip install 'kinfolk[onnx]'`")


def write_onnx(encoder: nn.Module, pictures: Tensor, path: Path, notes: Mapping[str, Any]) -> None:
    """Writes the encoder with its weights into one file; `notes` go into its metadata, each as JSON."""
    onnx: Any = importlib.import_module("onnx")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own deprecations
        program = torch.onnx.export(
            encoder,
            (pictures,),
            input_names=["pictures"],
            output_names=["features"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    for key, value in notes.items():
        model.metadata_props.append(onnx.StringStringEntryProto(key=key, value=json.dumps(value)))
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, str(path))


def run_onnx(path: Path, pictures: Tensor) -> Tensor:
    """The features that onnxruntime gives, on the processor."""
    runtime: Any = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (features,) = session.run(["features"], {"pictures": pictures.numpy()})
    return torch.from_numpy(features)
