"""Evaluation protocols: classifiers and clusterings on frozen features, fine-tuning, and the
quality of false-negative detection."""

from kinfolk.embedding import embed, evaluating, own_normalisation
from kinfolk.evaluation.detection import (
    DetectionQuality,
    DetectionResult,
    Similarity,
    ThresholdError,
    detection_quality,
    kin_similarity,
    label_nmi,
    mtpr_mtnr,
    nmi,
    quality_curve,
    threshold_error,
)
from kinfolk.evaluation.finetune import (
    FewLabels,
    FinetuneResult,
    ListedSubset,
    finetune,
    label_subset,
    read_subset,
    semi_supervised,
    tuning,
)
from kinfolk.evaluation.gradient_probe import GradientResult, ProbeSettings, gradient_probe
from kinfolk.evaluation.probes import (
    LinearResult,
    average_precision,
    knn_accuracy,
    knn_predict,
    linear_probe,
    mean_average_precision,
    mean_per_class,
    top5,
)
from kinfolk.evaluation.protocols import read_results, write_result
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
