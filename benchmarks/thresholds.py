"""How well thresholds are learned: "tracking" over a grid of settings, and all rules on features,
against the exact quantile.

    .venv/bin/python benchmarks/thresholds.py               the grid
    .venv/bin/python benchmarks/thresholds.py --features    GloFND's rules and starts, and FNC's batch thresholds

**The grid.** Normal similarities of 16 to 256 samples; each sample has its own mean (± half a
standard deviation) and its own standard deviation (± 30 %), 30 visits, start "quantile". `batch`,
`queue`: 511, 4,096 and 65,536 candidates, others at each visit. `bank`: 4,096 and 65,536 candidates
that stay the same, seen through view noise of a tenth of the standard deviation. `rotating`: the
samples' own means and standard deviations, and the similarities of a bank, turn by 45° over the
visits. `jump`: at the 16th visit all similarities jump by ± 0.5. Each line is the worst over the
means (0 to 0.97) and standard deviations (0.005 to 0.3) for which similarities stay within [−1, 1]:

    share    flagged in visits 10 to 30 in units of α (jumps: those before the jump), lowest and
             highest
    after    the same in the 8th to 10th visit after the jump
    error    mean absolute error of the thresholds at the end, in standard deviations of the
             sample's similarities

**Features.** Unit features (20,000 × 128) of a mixture of clusters, α = 0.01, batches of 128, one
view, 200 visits: each epoch is a random permutation cut into batches, all samples learn, and the
batches of an epoch are handed to the detector in groups of `--group` at a time (a threshold only
sees its own row, so that is the same arithmetic with fewer calls; the drift common to all samples
is then learned from that many batches at once). The error is taken over `--judged` samples against
the exact quantile over all 20,000.

`share` is the share flagged by the learned thresholds over the whole data set, in units of α; `in
training` is the share flagged in the batches themselves: its mean over the last tenth of the
visits, and its lowest and highest tenth after the first third.
"""  # noqa: E501

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor

from kinfolk.detectors import FNC, GloFND
from kinfolk.evaluation.detection import flagged_mask as flagged_by
from kinfolk.pairs import Block

N, D, ALPHA, BATCH = 20_000, 128, 0.01, 128
ROWS = (
    ("sgd", "one", 1.0),
    ("sgd", "quantile", 1.0),
    ("adam", "one", 0.05),
    ("adam", "quantile", 0.05),
    ("tracking", "one", 0.05),
    ("tracking", "quantile", 0.05),
)


@dataclass
class Run:
    """A detector and the share it flagged in each epoch, in units of α."""

    name: str
    detector: GloFND
    shares: list[float] = field(default_factory=list)


def normal_level(share: float) -> float:
    """What the share of a standard normal distribution lies above."""
    return NormalDist().inv_cdf(1 - share)


def mixture(clusters: int, spread: float, generator: torch.Generator) -> Tensor:
    """(N, D) unit features around random centres; clusters of unequal size."""
    centres = F.normalize(torch.randn(clusters, D, generator=generator), dim=1)
    label = torch.randint(0, clusters, (N,), generator=generator)
    return F.normalize(
        centres[label] + spread / math.sqrt(D) * torch.randn(N, D, generator=generator), dim=1
    )


def epoch(features: Tensor, batch: int, group: int, generator: torch.Generator) -> Iterator[Block]:
    """One permutation of the data set in batches; a block stacks `group` of them, each row with its
    own batch as candidates."""
    order = torch.randperm(N, generator=generator)[: N // batch * batch].view(-1, batch)
    for ids in torch.split(order, group):
        z = features[ids]
        sim = z @ z.transpose(1, 2)
        sim.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
        rows = sim.flatten(0, 1)
        yield Block(rows, ids.flatten(), ids[0], 1, torch.full((len(rows),), batch - 1))


def exact(features: Tensor, judged: Tensor) -> tuple[Tensor, Tensor]:
    """The (1 − α) quantile of each judged sample over all others, and its similarities to all (own:
    −inf)."""
    sim = features[judged] @ features.T
    sim[torch.arange(len(judged)), judged] = -torch.inf
    k = math.ceil(ALPHA * (N - 1))
    return sim.topk(k + 1, 1).values[:, k - 1 :].mean(1), sim


def report(name: str, error: Tensor, share: float, run: Run | None) -> None:
    line = f"  {name:20}{error.abs().mean():8.4f}{error.square().mean().sqrt():8.4f}{error.mean():+9.4f}{share:8.2f}"  # noqa: E501
    if run is not None:
        tenth = max(1, len(run.shares) // 10)
        parts = [
            sum(run.shares[i : i + tenth]) / tenth
            for i in range(len(run.shares) // 3, len(run.shares) - tenth + 1, tenth)
        ]
        line += f"{sum(run.shares[-tenth:]) / tenth:8.2f}   {min(parts):.2f} – {max(parts):.2f}"
    print(line, flush=True)


def case(
    title: str,
    feature_at: Callable[[int], Tensor],
    visits: int,
    batch: int,
    group: int,
    judged: int,
    seed: int,
    rules: str,
) -> None:
    print(f"\n{title}: {visits} visits, batch {batch}")
    print(f"  {'':20}{'MAE':>8}{'RMSE':>8}{'bias':>9}{'share':>8}   in training (last, range)")
    start = time.perf_counter()
    generator = torch.Generator().manual_seed(seed)
    rows = [row for row in ROWS if rules in row[0]]
    runs = [
        Run(f"{rule}, {init}", GloFND(num_samples=N, alpha=ALPHA, rule=rule, init=init, lr=lr))  # type: ignore[arg-type]
        for rule, init, lr in rows
    ]
    fnc, chosen = FNC(alpha=ALPHA), torch.randperm(N, generator=generator)[:judged]
    levels = torch.full((N,), torch.nan)
    for visit in range(visits):
        features = feature_at(visit)
        flagged, pairs = dict.fromkeys((run.name for run in runs), 0), 0
        for block in epoch(features, batch, group, generator):
            pairs += len(block.sim_RC) * (batch - 1)
            for run in runs:
                found = run.detector.find(block)
                run.detector.observe(block.ids, found.update)
                flagged[run.name] += int(flagged_by(found, block).sum())
            if visit == visits - 1:
                levels[block.ids] = block.sim_RC.masked_fill(
                    ~flagged_by(fnc.find(block), block), torch.inf
                ).amin(1)
        for run in runs:
            run.shares.append(flagged[run.name] / pairs / ALPHA)
    want, sim = exact(features, chosen)

    def share(level: Tensor, rows: Tensor) -> float:
        return ((sim[rows] > level.unsqueeze(1)).sum(1) / (N - 1)).mean().item() / ALPHA

    met = levels[chosen].isfinite()
    report("fnc, last batch", (levels[chosen] - want)[met], share(levels[chosen][met], met), None)
    everyone = torch.ones_like(met)
    for run in runs:
        level = run.detector.thresholds[chosen]
        report(run.name, level - want, share(level, everyone), run)
    print(f"  ({time.perf_counter() - start:.0f} s)")


def turning(clusters: int, spread: float, angle: float, visits: int) -> Callable[[int], Tensor]:
    """Every sample turns from its place in one mixture towards its place in another by `angle` over
    the visits."""
    generator = torch.Generator().manual_seed(1)
    here, there = mixture(clusters, spread, generator), mixture(clusters, spread, generator)

    def feature_at(visit: int) -> Tensor:
        turn = angle * visit / visits
        return F.normalize(here * math.cos(turn) + there * math.sin(turn), dim=1)

    return feature_at


EXPECTED = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 200.0)
SPREADS, MEANS = (0.005, 0.02, 0.1, 0.3), (0.0, 0.5, 0.9, 0.97)
VISITS, JUMP_AT = 30, 15


@dataclass(frozen=True)
class Source:
    """Where candidates come from: `samples` anchors with `n` negatives each, the same ones every
    visit or new ones."""

    name: str
    samples: int
    n: int
    stays: bool


SOURCES = (
    Source("batch", 256, 511, False),
    Source("queue", 64, 4096, False),
    Source("queue", 32, 65536, False),
    Source("bank", 64, 4096, True),
    Source("bank", 32, 65536, True),
)


@dataclass(frozen=True)
class Cell:
    """What one run found: the share in units of α, that after the jump, and the error of the
    thresholds."""

    share: float
    after: float
    error: float


class Similarities:
    """The similarities of all samples, visit by visit, and where their exact quantiles are."""

    def __init__(
        self, source: Source, mean: float, spread: float, turning: float, pool: Tensor, seed: int
    ) -> None:
        self.source, self.mean, self.spread, self.turning, self.pool = (
            source,
            mean,
            spread,
            turning,
            pool,
        )
        self.generator = torch.Generator().manual_seed(seed)
        self.offset, self.stretch = (
            torch.randn(2, source.samples, generator=self.generator) for _ in range(2)
        )
        self.fixed = (self._draw(), self._draw()) if source.stays else None

    def _draw(self) -> Tensor:
        first = torch.randint(
            len(self.pool) - self.source.n, (self.source.samples,), generator=self.generator
        )
        return torch.stack([self.pool[at : at + self.source.n] for at in first.tolist()])

    def _turned(self, pair: Tensor | tuple[Tensor, Tensor], visit: int) -> Tensor:
        angle = self.turning * visit / VISITS
        return pair[0] * math.cos(angle) + pair[1] * math.sin(angle)

    def own(self, visit: int) -> tuple[Tensor, Tensor]:
        """(b, 1), (b, 1) mean and standard deviation of each sample."""
        mean = self.mean + 0.5 * self.spread * self._turned(self.offset, visit).clamp(-2, 2)
        return mean.unsqueeze(1), (
            self.spread * (0.3 * self._turned(self.stretch, visit).clamp(-2, 2)).exp()
        ).unsqueeze(1)

    def at(self, visit: int) -> Tensor:
        mean, spread = self.own(visit)
        if self.fixed is None:
            return mean + spread * self._draw()
        return mean + spread * (
            math.sqrt(0.99) * self._turned(self.fixed, visit) + 0.1 * self._draw()
        )

    def quantile(self, visit: int, alpha: float) -> Tensor:
        """(b,) exact for candidates that are drawn, and half way between neighbours for those that
        stay."""
        mean, spread = self.own(visit)
        if self.fixed is None:
            return mean.squeeze(1) + spread.squeeze(1) * normal_level(alpha)
        k = max(1, round(alpha * self.source.n))
        seen = torch.cat([self.at(visit) for _ in range(8)], 1)
        return seen.topk(8 * k + 1, 1).values[:, 8 * k - 1 :].mean(1)


def cell(
    source: Source,
    expected: float,
    mean: float,
    spread: float,
    turning: float,
    jump: float,
    pool: Tensor,
    judged: bool,
    seed: int = 0,
) -> Cell:
    alpha, ids = expected / source.n, torch.arange(source.samples)
    detector = GloFND(num_samples=source.samples, alpha=alpha, init="quantile")
    similarities, shares = Similarities(source, mean, spread, turning, pool, seed), []
    negatives = torch.full((source.samples,), source.n)
    for visit in range(VISITS):
        sim = similarities.at(visit) + (jump if visit >= JUMP_AT else 0.0)
        block = Block(sim, ids, torch.arange(source.n) + source.samples, 1, negatives)
        found = detector.find(block)
        detector.observe(ids, found.update)
        shares.append(int(flagged_by(found, block).sum()) / (expected * source.samples))
    settled, after = shares[10:JUMP_AT] if jump else shares[10:], shares[JUMP_AT + 7 : JUMP_AT + 10]
    error = math.nan
    if judged:
        off = detector.thresholds - jump - similarities.quantile(VISITS - 1, alpha)
        error = (off.abs() / similarities.own(VISITS - 1)[1].squeeze(1)).mean().item()
    return Cell(sum(settled) / len(settled), sum(after) / len(after), error)


def fits(source: Source, expected: float, mean: float, spread: float, jump: float) -> bool:
    """Whether the similarities, and thresholds a little above their quantile, stay within [−1,
    1]."""
    reach = 1.5 * spread * (1 + normal_level(expected / source.n))
    return mean + max(jump, 0) + reach < 1 and mean + min(jump, 0) - 3 * spread > -1


def grid(seed: int) -> None:
    pool = torch.randn(1 << 22, generator=torch.Generator().manual_seed(seed))
    print(f"{'':15}{'':12}{'αn':>6}{'cells':>7}   share            after            error")
    for source in SOURCES:
        for motion, turning, jump in (
            ("frozen", 0.0, 0.0),
            ("rotating", math.pi / 4, 0.0),
            ("jump +0.5", 0.0, 0.5),
            ("jump −0.5", 0.0, -0.5),
        ):
            for expected in EXPECTED:
                pairs = [
                    (m, s) for m in MEANS for s in SPREADS if fits(source, expected, m, s, jump)
                ]
                if source.n > 1000:  # the rule is the same for all of them, and these take long
                    pairs = pairs[:: max(1, len(pairs) // 2)]
                cells = [
                    cell(source, expected, *pair, turning, jump, pool, expected >= 1, seed)
                    for pair in pairs
                ]
                if not cells:
                    continue
                share, after = ([getattr(c, name) for c in cells] for name in ("share", "after"))
                line = (
                    f"{source.name} {source.n:<8,} {motion:12}{expected:6g}{len(cells):7}  "
                    f" {min(share):.2f} – {max(share):.2f}"
                )
                line += f"      {min(after):.2f} – {max(after):.2f}" if jump else " " * 17
                print(
                    line + (f"      {max(c.error for c in cells):.3f}" if expected >= 1 else ""),
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description="Learned thresholds against the exact quantile.")
    parser.add_argument(
        "--features",
        action="store_true",
        help="GloFND's rules and starts on features, instead of the grid",
    )
    parser.add_argument("--visits", type=int, default=200)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the similarities, or of the batches"
    )
    parser.add_argument("--group", type=int, default=13, help="batches handed over at a time")
    parser.add_argument("--judged", type=int, default=2000)
    parser.add_argument("--rule", default="", help="only this rule")
    parser.add_argument("--all", action="store_true", help="further mixtures, and batches of 64")
    options = parser.parse_args()
    if not options.features:
        grid(options.seed)
        return
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {N} × {D}, alpha {ALPHA},"
        f" group {options.group}"
    )
    print("lr: " + ", ".join(dict.fromkeys(f"{rule} {lr:g}" for rule, _, lr in ROWS)))
    frozen = mixture(50, 0.7, torch.Generator().manual_seed(1))
    visits, rest = options.visits, (options.group, options.judged, options.seed, options.rule)
    case("frozen, 50 clusters", lambda _: frozen, visits, BATCH, *rest)
    case(
        "turning by 45° in all, 50 clusters",
        turning(50, 0.7, math.pi / 4, visits),
        visits,
        BATCH,
        *rest,
    )
    case(
        "short and fast: turning by 22° in all, 50 clusters",
        turning(50, 0.7, math.pi / 8, 30),
        30,
        BATCH,
        *rest,
    )
    if options.all:
        for clusters, spread in ((10, 1.0), (100, 1.0), (200, 0.7), (1000, 1.0)):
            other = mixture(clusters, spread, torch.Generator().manual_seed(1))
            case(f"frozen, {clusters} clusters", lambda _, x=other: x, visits, BATCH, *rest)  # type: ignore[misc]
        case(
            "frozen, 50 clusters, αn = 0.63",
            lambda _: frozen,
            visits,
            64,
            2 * options.group,
            *rest[1:],
        )


if __name__ == "__main__":
    main()
