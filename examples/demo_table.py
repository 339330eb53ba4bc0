"""The end of `make demo`: what a run reached, in five lines, and where its page is.

Run: python examples/demo_table.py RUN
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def figures(run: Path) -> dict[str, float]:
    """The accuracies of `kinfolk eval` and the false-negative figures of the last epoch."""
    last = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    accuracy = {
        path.stem: json.loads(path.read_text(encoding="utf-8")).get("accuracy")
        for path in (run / "eval").glob("*.json")
    }
    return {
        "kNN accuracy": accuracy["knn"],
        "linear probe accuracy": accuracy["linear"],
        "false negatives: precision": last["precision"],
        "false negatives: recall": last["recall"],
        "false negatives: F1": last["f1"],
    }


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/demo_table.py RUN")
    run = Path(sys.argv[1])
    rows = figures(run)
    width = max(map(len, rows))
    print()
    for name, value in rows.items():
        print(f"  {name:<{width}}  {value:7.1%}")
    print(f"\nOpen {(run / 'report.html').resolve()} in a browser.")


if __name__ == "__main__":
    main()
