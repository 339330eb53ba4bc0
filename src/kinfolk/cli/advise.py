"""`kinfolk advise --try`: the methods worth a try, tried on the data."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinfolk.errors import UsageError

if TYPE_CHECKING:
    from kinfolk.auditing import Audit
    from kinfolk.auditing.audit_input import AuditInput
    from kinfolk.trial import Trial

FOLDER, GUIDE, LABELS = "try", "guide.npy", "labels.npy"
"""Of a trial in the folder of the advice, and the files in it."""


def has_trial(out: Path) -> bool:
    """Whether the folder of an advice contains a trial that can be continued."""
    from kinfolk.trial import PLAN

    return (out / FOLDER / PLAN).is_file()


def try_methods(
    data: str,
    out: Path,
    minutes: float,
    settings: Mapping[str, Any],
    recipe: str | None,
    audited: tuple[Audit, AuditInput] | None = None,
    own_labels: bool = False,
) -> None:
    """Starts a trial on what was audited, or continues the one in `out`, and prints its result.

    Args:
        minutes: the time limit of the trainings.
        own_labels: whether the labels of the audit come from a file of the user, not from the data.
    """
    import numpy as np

    from kinfolk.auditing.verdict import Candidate, candidates
    from kinfolk.trial import run_trial

    folder, methods = out / FOLDER, list[Candidate]()
    if audited is not None:
        audit, given = audited
        if given.origin.captions:
            raise UsageError("--try compares methods for images, not for images with captions")
        folder.mkdir(parents=True, exist_ok=True)
        methods = candidates(audit, given.origin)
        if len(methods) == 1:  # features that tell little say little about the encoder's
            base = methods[0].method
            methods.append(Candidate("", "glofnd", f"{base}+glofnd", {"detector.alpha": 0.01}))
        if not isinstance(given.features, str | Path):
            np.save(folder / GUIDE, np.asarray(given.features, dtype=np.float16))
            methods = [_with_guide(each, given.origin.guide, folder / GUIDE) for each in methods]
        if own_labels and given.labels is not None:
            np.save(folder / LABELS, _numbers(given.labels))
    labels = np.load(folder / LABELS) if (folder / LABELS).exists() else None
    trial = run_trial(
        data,
        folder,
        methods,
        minutes=minutes,
        settings=settings,
        recipe=recipe,
        labels=labels,
    )
    show_trial(trial)


def _with_guide(candidate: Any, named: str | None, file: Path) -> Any:
    """The candidate, with the features that were audited in the place of their name."""
    if named is None or candidate.settings.get("detector.features") != named:
        return candidate
    return replace(candidate, settings={**candidate.settings, "detector.features": str(file)})


def _numbers(labels: Sequence[Any]) -> Any:
    """(N,) int64; −1 for None."""
    import numpy as np

    names = {name: number for number, name in enumerate(dict.fromkeys(labels)) if name is not None}
    return np.asarray([names.get(name, -1) for name in labels], dtype=np.int64)


def show_trial(trial: Trial) -> None:
    """Prints the table, the verdict, and the command for the long run."""
    from rich.text import Text

    from kinfolk.cli.compare import show_comparison
    from kinfolk.cli.options import screen
    from kinfolk.errors import printable
    from kinfolk.trial import CRITERIA

    console, plan = screen(), trial.plan
    if trial.table is not None:
        console.print()
        show_comparison(trial.table, console)
        console.print(
            Text(f"{plan.criterion}: {CRITERIA[plan.criterion]}.", "dim"), soft_wrap=False
        )
    console.print()
    console.print(Text(printable(trial.verdict()), "bold"), soft_wrap=False)
    if trial.table is None:
        return
    chosen = trial.best or plan.candidates[0]
    data = shlex.quote(plan.data)
    for key, value in plan.settings.items():
        data += (
            " --labels-from-folders"
            if key == "data.labels_from_folders"
            else f" --set {shlex.quote(f'{key}={value}')}"
        )
    data += "" if plan.recipe is None else f" --recipe {shlex.quote(plan.recipe)}"
    console.print()
    console.print(Text("The long run:", "dim"))
    console.print(f"  {printable(chosen.command(data))}", markup=False, soft_wrap=True)
