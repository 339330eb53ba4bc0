"""What a representation is worth: features of whole data sets, nearest neighbours, linear probe."""

from kinfolk.evaluation.clusters import label_nmi, mtpr_mtnr, nmi, quality_curve
from kinfolk.evaluation.embed import embed, evaluating
from kinfolk.evaluation.knn import knn_accuracy, knn_predict
from kinfolk.evaluation.linear import LinearResult, linear_probe
from kinfolk.evaluation.results import read_results, write_result

__all__ = [
    "LinearResult",
    "embed",
    "evaluating",
    "knn_accuracy",
    "knn_predict",
    "label_nmi",
    "linear_probe",
    "mtpr_mtnr",
    "nmi",
    "quality_curve",
    "read_results",
    "write_result",
]
