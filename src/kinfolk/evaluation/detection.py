"""What is flagged as a false negative, against the labels, over a whole data set: exact, in row blocks, no N × N matrix is kept.

    precision, recall, F1    over all pairs of an anchor and a candidate of another sample; and     GloFND, Table 1
                             per anchor, as means over the samples (`kinfolk.stats`)
    MTPR, MTNR               mean over the anchors of the share of their false negatives that is    IFND, section 4.4
                             flagged, and of their true negatives that is not; of the first level
    thresholds               learned ones against the exact (1 − α) quantile: MAE, RMSE             GloFND, section 5
    similarity               of the views of a sample (true positives), of samples of one class     SPCL, Table 2
                             (false negatives) and of different classes

Dimension key: N samples, V views, D embedding, B anchor samples, b samples of a block, R = b·V rows, C = N·V candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as functional
from torch import Tensor

from kinfolk.data.prepare import show_progress
from kinfolk.detectors.quantile import batch_quantile
from kinfolk.errors import KinfolkError
from kinfolk.kinship import Interval, Roles, select
from kinfolk.pairs import LEFT_OUT, Block
from kinfolk.stats import Labels, Stats, count

_BLOCK_ELEMENTS = 1 << 23
NAN = float("nan")

Find = Callable[[Block], Sequence[Roles]]
"""Says who is kin in a block, one `Roles` for each level: `lambda block: detector.find(block).levels`."""


@dataclass
class Judged:
    """What a rule flagged, and how far it was right; shares in [0, 1], NaN where nothing could be counted.

    Args:
        stats: counts over all pairs and levels.
        found, kept: sums over the anchors of the share of their false negatives that were flagged, and of their negatives that were not, at
            the first level, which is the one that `mtpr` and `mtnr` of a training are of.
        with_kin, with_others: anchors that have such pairs.
    """

    stats: Stats = field(default_factory=Stats.empty)
    found: float = 0.0
    kept: float = 0.0
    with_kin: int = 0
    with_others: int = 0

    @property
    def mtpr(self) -> float:
        """Mean true positive rate: the share of an anchor's false negatives that are flagged, mean over the anchors."""
        return self.found / self.with_kin if self.with_kin else NAN

    @property
    def mtnr(self) -> float:
        """Mean true negative rate: the share of an anchor's true negatives that are not flagged, mean over the anchors."""
        return self.kept / self.with_others if self.with_others else NAN

    def metrics(self) -> dict[str, float]:
        """All of them by name."""
        return {**self.stats.detection(), "mtpr": self.mtpr, "mtnr": self.mtnr}


@dataclass(frozen=True)
class KinResult:
    """What `judge_kin` found.

    Args:
        rule: of `find`; None without it.
        exact: of flagging what is above the exact quantile.
        thresholds: (B,) the exact (1 − α) quantile of each anchor's similarities.
    """

    rule: Judged | None
    exact: Judged
    thresholds: Tensor


def judge_kin(
    embeddings: Tensor,
    labels: Tensor,
    alpha: float,
    find: Find | None = None,
    *,
    anchors: Tensor | None = None,
    progress: bool = False,
) -> KinResult:
    """Compares the views of the anchors with those of all samples, and who is flagged with the labels.

    A sample's own views are no candidates. A pair counts where both labels are known; a sample without a label is a candidate all the same.

    Args:
        embeddings: (N, V, D), made unit norm.
        labels: (N,) classes; below 0: unknown.
        alpha: share of an anchor's similarities that lie above its exact quantile, taken over all its views.
        find: another rule, such as a detector's.
        anchors: (B,) ids of the samples to look at; None: all.
        progress: whether to show a bar.
    """
    if embeddings.ndim != 3 or labels.shape != embeddings.shape[:1]:
        raise ValueError(
            f"`embeddings` (={tuple(embeddings.shape)}) and `labels` (={tuple(labels.shape)}) must have the shapes (N, views, size), (N,)"
        )
    if not 0 < alpha < 1:
        raise ValueError(f"`alpha` (={alpha}) must be in (0, 1)")
    if len(embeddings) < 2:
        raise KinfolkError("False negatives are among other samples; at least two are needed.")
    unit_NVD, labels_N = functional.normalize(embeddings.float(), dim=2), labels.to(torch.int64)
    chosen = torch.arange(len(labels_N)) if anchors is None else anchors
    exact, rule = Judged(), None if find is None else Judged()
    thresholds = []
    for block in _blocks(unit_NVD, chosen, progress):
        views = block.num_views
        n_b = block.num_negatives_R.view(-1, views).sum(1)
        level_b = batch_quantile(block.sim_RC.reshape(len(block.ids), -1), n_b, alpha).float()
        thresholds.append(level_b)
        _judge(exact, block, [Roles(kin=Interval(block.per_row(level_b)))], labels_N)
        if find is not None and rule is not None:
            _judge(rule, block, find(block), labels_N)
    return KinResult(rule, exact, torch.cat(thresholds))


def _blocks(unit_NVD: Tensor, anchors_B: Tensor, progress: bool) -> Iterator[Block]:
    """Blocks of anchors against everybody."""
    num, views, _ = unit_NVD.shape
    candidates_CD, ids_C = unit_NVD.flatten(0, 1), torch.arange(num).repeat_interleave(views)
    step = max(1, _BLOCK_ELEMENTS // (num * views * views))
    starts = range(0, len(anchors_B), step)
    for first in show_progress(starts, len(starts), "Comparing all with all", enabled=progress):
        ids_b = anchors_B[first : first + step]
        sim_RC = unit_NVD[ids_b].flatten(0, 1) @ candidates_CD.T
        sim_RC.masked_fill_(ids_b.repeat_interleave(views).unsqueeze(1) == ids_C, LEFT_OUT)
        yield Block(sim_RC, ids_b, ids_C, views, torch.full((len(sim_RC),), (num - 1) * views))


def _judge(judged: Judged, block: Block, levels: Sequence[Roles], labels_N: Tensor) -> None:
    """Adds a block to the counts; rates of an anchor are those of the first level."""
    alike = Labels(labels_N, 0).alike(block)
    known_RC, same_RC = alike.known_RC, alike.same_RC
    alike_R, other_R = same_RC.sum(1), (known_RC - same_RC).sum(1)
    for level, roles in enumerate(levels):
        kin_RC, _ = select(block.sim_RC, roles)
        kin_RC = torch.zeros_like(same_RC) if kin_RC is None else kin_RC
        counts = count(block.num_negatives_R, kin_RC.sum(1), kin_RC, alike, block.num_views)
        judged.stats = judged.stats + Stats.from_counts(torch.cat((counts, counts.new_zeros(4))))
        if level > 0:
            continue
        hits_R, judged_R = (kin_RC * same_RC).sum(1), (kin_RC * known_RC).sum(1)
        judged.found += float((hits_R / alike_R)[alike_R > 0].double().sum())
        judged.kept += float((1 - (judged_R - hits_R) / other_R)[other_R > 0].double().sum())
        judged.with_kin += int((alike_R > 0).sum())
        judged.with_others += int((other_R > 0).sum())
