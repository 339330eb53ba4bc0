"""A table of text pairs for the tests, and settings of a training of a second on it."""

from __future__ import annotations

import csv
from pathlib import Path

SMALL = {
    "text.layers": 1,
    "text.width": 16,
    "text.heads": 2,
    "text.context": 16,
    "text.vocab_size": 300,
    "trainer.precision": "32",
    "trainer.loggers": [],
}
THINGS = ("card", "key", "phone", "ticket", "book", "bag")
SAYINGS = {
    "lost": ("i lost my {}", "my {} is gone", "i cannot find the {}", "where is my {}"),
    "price": ("how much is a {}", "what does a {} cost", "price of one {}", "the fee for a {}"),
}


def rows(negatives: int = 0) -> list[dict[str, str]]:
    """48 pairs in twelve classes, no text twice; every fourth is for testing. A negative is about
    the same thing, said for the other reason."""
    found = []
    for reason, sayings in SAYINGS.items():
        others = SAYINGS["price" if reason == "lost" else "lost"]
        for thing in THINGS:
            for number, saying in enumerate(sayings):
                row = {
                    "anchor": f"{saying.format(thing)} please",
                    "positive": f"hello, {saying.format(thing)}",
                    "label": f"{reason} {thing}",
                    "split": "test" if number == 3 else "train",
                }
                for k in range(negatives):
                    row[f"negative_{k + 1}"] = f"{others[(number + k) % 4].format(thing)} now"
                found.append(row)
    return found


def write_table(path: Path, table: list[dict[str, str]] | None = None, negatives: int = 0) -> Path:
    """A .csv or .tsv file."""
    table = rows(negatives) if table is None else table
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(
            file, list(table[0]), delimiter="\t" if path.suffix == ".tsv" else ","
        )
        writer.writeheader()
        writer.writerows(table)
    return path
