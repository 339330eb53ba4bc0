"""Encoders and heads: networks that map an image or a text to a vector."""

from kinfolk.models.encoders import (
    Adapted,
    ResNet,
    adapt,
    build_encoder,
    resnet10,
    resnet18,
    resnet34,
    resnet50,
)
from kinfolk.models.heads import SplitEncoder, SplitHead, prediction_head, projection_head
from kinfolk.models.text import OpenClipText, TextTransformer, build_text
from kinfolk.models.weights import load_encoder, load_state, load_weights, read_state, save_encoder

__all__ = [
    "Adapted",
    "OpenClipText",
    "ResNet",
    "SplitEncoder",
    "SplitHead",
    "TextTransformer",
    "adapt",
    "build_encoder",
    "build_text",
    "load_encoder",
    "load_state",
    "load_weights",
    "prediction_head",
    "projection_head",
    "read_state",
    "resnet10",
    "resnet18",
    "resnet34",
    "resnet50",
    "save_encoder",
]
