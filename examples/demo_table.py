"""The end of `make demo`: two runs side by side, without the detector and with it.

Run: python examples/demo_table.py BASE RUN
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROWS = {
    "knn": "kNN accuracy",
    "linear": "linear probe accuracy",
    "precision": "false negatives: precision",
    "recall": "false negatives: recall",
    "f1": "false negatives: F1",
}


def figures(run: Path) -> dict[str, float]:
    """The accuracies of `kinfolk eval`, and the false-negative figures of the last epoch."""
    last = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    results = {
        path.stem: json.loads(path.read_text(encoding="utf-8")).get("accuracy")
        for path in (run / "eval").glob("*.json")
    }
    return {name: value for name, value in {**last, **results}.items() if name in ROWS}


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: python examples/demo_table.py BASE RUN")
    base, run = map(Path, sys.argv[1:])
    without, with_detector = figures(base), figures(run)
    print(f"\n  {'':<26}  {'sogclr':>8}  {'sogclr+glofnd':>13}  difference")
    for name, text in ROWS.items():
        if name in without:
            both = f"{without[name]:8.1%}  {with_detector[name]:13.1%}"
            print(f"  {text:<26}  {both}  {100 * (with_detector[name] - without[name]):+10.1f}")
        else:
            print(f"  {text:<26}  {'–':>8}  {with_detector[name]:13.1%}")
    print("\nOne seed. Open in a browser:")
    for page, text in (("report.html", "the run"), ("compare.html", "the comparison")):
        print(f"  {(run / page).resolve()}  {text}")


if __name__ == "__main__":
    main()
