"""What every store holds, and what crosses ranks, by arithmetic: the tables of docs/scale.md. A test compares them with the real stores.

    .venv/bin/python benchmarks/scale.py

Key: N samples of the data set, B of a step on all ranks together, D embedding, L levels of clusters, K clusters in all of them, H levels
of a hierarchy, Q places of a queue, P known pairs, each counted in both directions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

D, L, H, Q = 128, 3, 3, 65_536
B = 4096
SIZES = (10**6, 10**8, 10**10)
PAIRS = 20
"""Known pairs a sample: ten listed, in both directions."""


def clusters(N: int) -> int:
    """K of IFND's usual numbers: N/500, three and ten times that."""
    return sum(round(N / 500 * times) for times in (1, 3, 10))


@dataclass(frozen=True)
class Held:
    """A store: who has it, its bytes as a formula and as a function of N, and a small one to compare with."""

    name: str
    of: str
    formula: str
    bytes: Callable[[int], int]
    make: Callable[[int], nn.Module]


@dataclass(frozen=True)
class Sent:
    """What is joined over ranks: in a step as a function of B, or in a refresh as one of N."""

    name: str
    of: str
    formula: str
    bytes: Callable[[int], int]


def held() -> list[Held]:
    import torch

    import kinfolk as kf
    from kinfolk.clustering.labels import ClusterLabels
    from kinfolk.detectors.boundaries import Boundaries
    from kinfolk.detectors.ifnd import usual_clusters
    from kinfolk.stores import Bank, Queue
    from kinfolk.stores.collected import Collected

    def collected(N: int) -> nn.Module:
        store = Collected(N)
        store.write(torch.zeros(1, dtype=torch.int64), torch.zeros(1, D))
        return store

    def tree(N: int) -> nn.Module:
        made = kf.Hierarchy(N, levels=H)
        made.clusters.update(torch.zeros(1, dtype=torch.int64), torch.ones(1, D))
        return made

    def ifnd(N: int) -> nn.Module:
        made = kf.IFND(N)
        made.clusters.centroids = torch.zeros(sum(made.num_clusters), D)
        return made

    def labels(N: int) -> nn.Module:
        return ClusterLabels(N, D, usual_clusters(N), seed=0)

    def known(N: int) -> nn.Module:
        anchor = torch.arange(N).repeat_interleave(PAIRS)
        return kf.Known(N, torch.stack((anchor, (anchor + torch.arange(PAIRS).repeat(N) + 1) % N), 1), symmetric=False)

    return [
        Held("`PerSample`: u", "`sogclr`", "5·N", lambda N: 5 * N, lambda N: kf.SogCLR(N, 0.1)),
        Held("the same, images and texts", "`sogclr-clip`, `fastclip`", "10·N", lambda N: 10 * N, lambda N: kf.BimodalSogCLR(N, 0.1)),
        Held("thresholds, tracking", "`glofnd`", "24·N", lambda N: 24 * N + 4, lambda N: kf.GloFND(N, 0.01)),
        Held("thresholds, Adam", "`glofnd`", "20·N", lambda N: 20 * N, lambda N: kf.GloFND(N, 0.01, rule="adam")),
        Held("thresholds, SGD", "`glofnd`", "12·N", lambda N: 12 * N, lambda N: kf.GloFND(N, 0.01, rule="sgd")),
        Held("one threshold for all", "`glofnd`, `shared`", "24", lambda N: 24, lambda N: kf.GloFND(N, 0.01, shared=True)),
        Held("two thresholds", "`ring:learned`", "32·N", lambda N: 32 * N, Boundaries),
        Held("`Bank`", "`ir`, `la`, `cmc`", "(4·D + 1)·N", lambda N: (4 * D + 1) * N, lambda N: Bank(N, D)),
        Held("`Collected`", "`ifnd`, `source=bank`", "(4·D + 1)·N", lambda N: (4 * D + 1) * N, collected),
        Held("clusters", "`pcl`, `la`, `cave`", "8·L·N + 4·D·K", lambda N: 8 * L * N + 4 * D * clusters(N), labels),
        Held("clusters, accepted labels, confidence", "`ifnd`", "20·L·N + 4·D·K", lambda N: 20 * L * N + 4 * D * clusters(N), ifnd),
        Held("hierarchy", "`hierarchy`, `rcl`", "(56 + 4·D)·H·N", lambda N: (56 + 4 * D) * H * N, tree),
        Held("labels", "`oracle`", "8·N", lambda N: 8 * N, lambda N: kf.Oracle(torch.zeros(N, dtype=torch.int64))),
        Held("known pairs", "`known`", "8·N + 8·P", lambda N: (8 + 8 * PAIRS) * N, known),
        Held("`Queue`", "`moco`, `nnclr`, `rcl`, `pcl`", "(4·D + 8)·Q", lambda N: (4 * D + 8) * Q, lambda N: Queue(Q, D)),
    ]


def steps() -> list[Sent]:
    return [
        Sent("embeddings and ids", "`simclr`, `sogclr` and others without queue or bank", "2·B·(4·D + 8)", lambda b: 2 * b * (4 * D + 8)),
        Sent("their gradient", "the same", "8·B·D", lambda b: 8 * b * D),
        Sent("u", "`sogclr`", "13·B", lambda b: 13 * b),
        Sent("thresholds, tracking", "`glofnd`", "40·B", lambda b: 40 * b),
        Sent("two thresholds", "`ring:learned`", "40·B", lambda b: 40 * b),
        Sent("rows of the queue", "`moco`, `pcl`", "B·(4·D + 8)", lambda b: b * (4 * D + 8)),
        Sent("rows of the bank", "`ir`, `la`", "B·(4·D + 8)", lambda b: b * (4 * D + 8)),
        Sent("collected embeddings", "`ifnd`, `source=bank`; `hierarchy`", "B·(8·D + 8)", lambda b: b * (8 * D + 8)),
    ]


def refreshes() -> list[Sent]:
    return [
        Sent("features of all", "`ifnd`, `pcl`, `hierarchy`, where no bank has them", "4·D·N", lambda N: 4 * D * N),
        Sent("clusters", "`pcl`, `la`, `cave`", "8·L·N + 4·D·K", lambda N: 8 * L * N + 4 * D * clusters(N)),
        Sent("clusters, accepted labels, confidence", "`ifnd`", "20·L·N + 4·D·K", lambda N: 20 * L * N + 4 * D * clusters(N)),
    ]


def size(number: int) -> str:
    """Bytes in the largest unit that leaves a whole part, decimal."""
    for unit, power in (("PB", 15), ("TB", 12), ("GB", 9), ("MB", 6), ("kB", 3)):
        if number >= 10**power:
            return f"{number / 10**power:.3g} {unit}"
    return f"{number} bytes"


def main() -> None:
    print("| store | of | bytes | N = 10⁶ | N = 10⁸ | N = 10¹⁰ |\n|---|---|---|---|---|---|")
    for store in held():
        print(f"| {store.name} | {store.of} | {store.formula} | {' | '.join(size(store.bytes(N)) for N in SIZES)} |")
    print(f"\n| in a step | of | bytes | B = {B:,} |\n|---|---|---|---|")
    for part in steps():
        print(f"| {part.name} | {part.of} | {part.formula} | {size(part.bytes(B))} |")
    print("\n| in a refresh | of | bytes | N = 10⁶ | N = 10⁸ | N = 10¹⁰ |\n|---|---|---|---|---|---|")
    for part in refreshes():
        print(f"| {part.name} | {part.of} | {part.formula} | {' | '.join(size(part.bytes(N)) for N in SIZES)} |")


if __name__ == "__main__":
    main()
