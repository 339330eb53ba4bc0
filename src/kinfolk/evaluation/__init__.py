"""What a representation is worth: features of whole data sets, classifiers on them, clusters, and the false negatives a method flags."""

from kinfolk.embedding import embed, evaluating, own_normalisation
from kinfolk.evaluation.clusters import label_nmi, mtpr_mtnr, nmi, quality_curve
from kinfolk.evaluation.detection import KinResult, judge_kin
from kinfolk.evaluation.finetune import FinetuneResult, finetune, tuning
from kinfolk.evaluation.gradient_probe import GradientResult, ProbeSettings, gradient_probe
from kinfolk.evaluation.knn import knn_accuracy, knn_predict
from kinfolk.evaluation.linear import LinearResult, average_precision, linear_probe, mean_average_precision, mean_per_class, top5
from kinfolk.evaluation.protocols import read_results, write_result
from kinfolk.evaluation.retrieval import Similarity, ThresholdError, kin_similarity, threshold_error
from kinfolk.evaluation.semi_supervised import FewLabels, ListedSubset, label_subset, read_subset, semi_supervised
from kinfolk.evaluation.transfer import TransferResult, transfer

__all__ = [
    "FewLabels",
    "FinetuneResult",
    "GradientResult",
    "KinResult",
    "LinearResult",
    "ListedSubset",
    "ProbeSettings",
    "Similarity",
    "ThresholdError",
    "TransferResult",
    "average_precision",
    "embed",
    "evaluating",
    "finetune",
    "gradient_probe",
    "judge_kin",
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
