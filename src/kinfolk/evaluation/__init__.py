"""Evaluation protocols: classifiers and clusterings on frozen features, fine-tuning, and the
quality of false-negative detection."""

from kinfolk.embedding import embed
from kinfolk.evaluation.detection import (
    detection_quality,
    kin_similarity,
    label_nmi,
    mtpr_mtnr,
    nmi,
    threshold_error,
)
from kinfolk.evaluation.gradient_training import finetune, gradient_probe, label_subset
from kinfolk.evaluation.probes import knn_accuracy, linear_probe, transfer

__all__ = [
    "detection_quality",
    "embed",
    "finetune",
    "gradient_probe",
    "kin_similarity",
    "knn_accuracy",
    "label_nmi",
    "label_subset",
    "linear_probe",
    "mtpr_mtnr",
    "nmi",
    "threshold_error",
    "transfer",
]
