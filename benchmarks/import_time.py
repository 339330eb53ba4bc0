"""What `import kinfolk` with its losses and detectors costs beside `import torch`: medians of
interleaved fresh interpreters.

The public names are loaded when asked for, so the bare import costs next to nothing; what counts is
the import with all names but `train`.

Run: python benchmarks/import_time.py [runs]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

LIMIT = 1.15


BARE = "import kinfolk"
WHOLE = 'import kinfolk; [getattr(kinfolk, name) for name in kinfolk.__all__ if name != "train"]'


def seconds(statement: str) -> float:
    """Seconds that a fresh interpreter takes for the statement alone."""
    script = (
        f"import time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
    )
    return float(
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout
    )


def help_seconds() -> float:
    """Seconds of `kinfolk --help`, start to end."""
    start = time.perf_counter()
    subprocess.run(
        [Path(sys.executable).with_name("kinfolk"), "--help"], capture_output=True, check=True
    )
    return time.perf_counter() - start


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    seconds(WHOLE)  # fills the file cache and writes the byte code
    pairs = [(seconds("import torch"), seconds(WHOLE)) for _ in range(runs)]
    torch_s, whole_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(whole / torch for torch, whole in pairs)
    print(f"import torch                {torch_s:.2f} s")
    print(f"import kinfolk, all names   {whole_s:.2f} s   ratio {ratio:.3f} (at most {LIMIT})")
    print(f"import kinfolk              {statistics.median(seconds(BARE) for _ in range(3)):.2f} s")
    print(
        f"kinfolk --help              {statistics.median(help_seconds() for _ in range(3)):.2f} s"
        " (at most 1.00)"
    )


if __name__ == "__main__":
    main()
