"""From a folder of images to a decision: is a method that knows false negatives worth it here?

Run: python examples/folder_to_decision.py [FOLDER [EPOCHS]]

FOLDER has a sub-folder for each class. Without it, scikit-learn's digits are written to `photos`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

import kinfolk as kf

METHODS = ("simclr", "simclr+glofnd", "simclr+guide")


def write_digits(folder: Path) -> Path:
    """1,797 files in ten sub-folders."""
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        place = folder / f"digit {label}"
        place.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((pixels * 15.9).astype(np.uint8))
        image.resize((16, 16)).save(place / f"{number:04}.png")
    return folder


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else write_digits(Path("photos"))
    epochs = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    common = {"data.labels_from_folders": True, "views.preset": "mild"}  # digits are not mirrored
    found = kf.sweep(
        folder,
        "decision",
        methods=METHODS,
        seeds=(0, 1, 2),
        epochs=epochs,
        common=common,
        protocols=("knn",),
        report=False,
    )
    table = found.table
    assert table is not None, "the sub-folders are the classes"

    audit = kf.audit(found.runs[0].path, alpha=0.05)
    print(f"\n{audit.kin_share:.1%} of all pairs are false negatives, by the labels.")
    print(f"Of the nearest 5 % by plain SimCLR, {audit.precision:.0%} are.\n")
    for row in table.records:
        print(f"{row['method']:<20}  kNN {row['knn']:.1f} ± {row['knn_deviation']:.1f}")
    print("\n".join(table.sentences()))
    better = [row for row in table.records if row["knn_verdict"] == "better"]
    best = max(better, key=lambda row: float(row["knn"]), default=table.records[0])
    print(f"\nDecision: {best['method']}")
    table.save("decision/compare.html")


if __name__ == "__main__":
    main()
