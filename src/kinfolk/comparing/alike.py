"""Whether runs can be compared: the same samples to learn from, and the same to be measured on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kinfolk.errors import UsageError

if TYPE_CHECKING:
    from kinfolk.comparing.runs import One


HOW = ("probe", "k", "temperature", "normaliser", "finetuning", "features", "normalised_by")
"""Settings of a protocol that results must share."""
USUAL = {"normaliser": "arithmetic", "finetuning": "ifnd"}
"""What results of earlier versions, which do not name it, were measured with."""


def where_measured(result: Mapping[str, Any], own: str | None) -> tuple[str, ...]:
    """What must be alike for two results to be comparable; the run's own data is known by its samples, not by its path."""
    data = "the run's own data" if result.get("data") == own else str(result.get("data"))
    counts = [f"{result[key]:,} to {key}" for key in ("train", "test") if isinstance(result.get(key), int)]
    how = [f"{key.replace('_', ' ')} {result[key]}" for key in HOW if key in result and result[key] != USUAL.get(key)]
    return data, str(result.get("measured_on", "")), *counts, *how


def require_same_data(runs: Sequence[One]) -> None:
    """Refuses runs that learnt from other samples than the first, or were measured otherwise."""
    import pyarrow.parquet as pq

    def samples(run: One) -> Any:
        path = run.path / "samples.parquet"
        return pq.read_table(path, columns=["key", "split", "digest"]) if path.is_file() else None

    first, its = runs[0], samples(runs[0])
    for run in runs[1:]:
        ours = samples(run)
        if not (run.source == first.source if its is None or ours is None else ours.equals(its)):
            sizes = ["" if table is None else f" ({len(table):,} samples)" for table in (its, ours)]
            raise UsageError(
                f"{first.path} learnt from {first.source}{sizes[0]} and {run.path} from {run.source}{sizes[1]}, which are different data; "
                "compare runs on the same"
            )
        for name in first.measured_on.keys() & run.measured_on.keys():
            if run.measured_on[name] != first.measured_on[name] and run.settings.get("data.depth") == first.settings.get("data.depth"):
                was, now = (", ".join(filter(None, each.measured_on[name])) for each in (first, run))
                raise UsageError(f"{name} was not measured alike: of {first.path} on {was}; of {run.path} on {now}; evaluate them alike")
