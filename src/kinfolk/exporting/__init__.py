"""Encoders for other software: safetensors, torchvision, timm, detectron2, ONNX."""

from kinfolk.exporting.write_export import FORMATS, Exported, export

__all__ = ["FORMATS", "Exported", "export"]
