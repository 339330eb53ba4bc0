"""Evaluation protocols: classifiers and clusterings on frozen features, fine-tuning, and the quality of false-negative detection."""

from kinfolk.embedding import embed, evaluating, own_normalisation
from kinfolk.evaluation.clusters import label_nmi, mtpr_mtnr, nmi, quality_curve
from kinfolk.evaluation.detection import (
    DetectionQuality,
    DetectionResult,
    Similarity,
    ThresholdError,
    detection_quality,
    kin_similarity,
    threshold_error,
)
from kinfolk.evaluation.finetune import FinetuneResult, finetune, tuning
from kinfolk.evaluation.gradient_probe import GradientResult, ProbeSettings, gradient_probe
from kinfolk.evaluation.knn import knn_accuracy, knn_predict
from kinfolk.evaluation.linear import LinearResult, average_precision, linear_probe, mean_average_precision, mean_per_class, top5
from kinfolk.evaluation.protocols import read_results, write_result
from kinfolk.evaluation.semi_supervised import FewLabels, ListedSubset, label_subset, read_subset, semi_supervised
from kinfolk.evaluation.transfer import TransferResult, transfer

__all__ = [
    "DetectionQuality",
    "DetectionResult",
    "FewLabels",
    "FinetuneResult",
    "GradientResult",
    "LinearResult",
    "ListedSubset",
    "ProbeSettings",
    "Similarity",
    "ThresholdError",
    "TransferResult",
    "average_precision",
    "detection_quality",
    "embed",
    "evaluating",
    "finetune",
    "gradient_probe",
    "kin_similarity",
    "knn_accuracy",
    "knn_predict",
    "label_nmi",
    "label_subset",
    "linear_probe",
    "mean_average_precision",
    "mean_per_class",
    "mtpr_mtnr",
    "nmi",
    "own_normalisation",
    "quality_curve",
    "read_results",
    "read_subset",
    "semi_supervised",
    "threshold_error",
    "top5",
    "transfer",
    "tuning",
    "write_result",
]
