"""What a representation is worth: features of whole data sets, classifiers on them, clusters, and the false negatives a method flags."""

from kinfolk.evaluation.clusters import label_nmi, mtpr_mtnr, nmi, quality_curve
from kinfolk.evaluation.embed import embed, evaluating
from kinfolk.evaluation.finetune import FinetuneResult, finetune, tuning
from kinfolk.evaluation.gradient_probe import GradientResult, ProbeSettings, gradient_probe
from kinfolk.evaluation.kin import KinResult, judge_kin
from kinfolk.evaluation.knn import knn_accuracy, knn_predict
from kinfolk.evaluation.linear import LinearResult, linear_probe
from kinfolk.evaluation.metrics import average_precision, mean_average_precision, mean_per_class, top5
from kinfolk.evaluation.normalisation import own_normalisation
from kinfolk.evaluation.results import read_results, write_result
from kinfolk.evaluation.semi import FewLabels, semi_supervised
from kinfolk.evaluation.similarity import Similarity, ThresholdError, kin_similarity, threshold_error
from kinfolk.evaluation.subsets import ListedSubset, label_subset, read_subset
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
