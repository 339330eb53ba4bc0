"""What one batch of a training runs through: files and named functions of kinfolk, by profile.

    .venv/bin/python benchmarks/one_batch.py [--method simclr] [--list]

From a training step in the middle of the second epoch to the next one: views, framework, loss,
backward, optimiser, state, sums for the log, and the next batch, in all threads.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import kinfolk
from kinfolk.training.module import TrainingModule

SOURCE = str(Path(kinfolk.__file__).parent)
STEPS, BATCH, MIDDLE = 8, 32, 4


def functions_of_one_batch(method: str) -> set[tuple[str, str]]:
    """(file, function) of everything that ran, except comprehensions and lambdas."""
    found, training_step = set[tuple[str, str]](), TrainingModule.training_step
    is_on = False

    def record(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        ours = is_on and event == "call" and code.co_filename.startswith(SOURCE)
        if ours and not code.co_name.startswith("<"):
            name = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
            found.add((code.co_filename[len(SOURCE) + 1 :], name))

    def step(self: TrainingModule, batch: dict[str, Any], batch_idx: int) -> Any:
        nonlocal is_on
        is_on = self.current_epoch == 1 and batch_idx == MIDDLE
        return training_step(self, batch, batch_idx)

    TrainingModule.training_step = step  # type: ignore[method-assign]
    threading.setprofile(record)
    sys.setprofile(record)
    images = np.random.default_rng(0).integers(0, 256, (STEPS * BATCH, 32, 32, 3), dtype=np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        kinfolk.train(
            (images, np.arange(len(images)) % 10),
            Path(folder) / "run",
            method=method,
            epochs=2,
            batch_size=BATCH,
            model="resnet10",
            progress=False,
            report=False,
        )
    sys.setprofile(None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="sogclr+glofnd")
    parser.add_argument("--list", action="store_true", help="name the functions")
    options = parser.parse_args()
    found = sorted(functions_of_one_batch(options.method))
    for file, name in found if options.list else ():
        print(f"{file:32}{name}")
    print(f"{options.method}: {len({file for file, _ in found})} files, {len(found)} functions")


if __name__ == "__main__":
    main()
