"""What `import kinfolk` costs beside `import torch`: the median of interleaved fresh interpreters, and the ratio.

Run: python benchmarks/import_time.py [runs]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

LIMIT = 1.15


def seconds(module: str) -> float:
    """Seconds that a fresh interpreter takes for the import alone."""
    script = f"import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
    return float(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)


def help_seconds() -> float:
    """Seconds of `kinfolk --help`, start to end."""
    start = time.perf_counter()
    subprocess.run([Path(sys.executable).with_name("kinfolk"), "--help"], capture_output=True, check=True)
    return time.perf_counter() - start


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    seconds("kinfolk")  # fills the file cache and writes the byte code
    pairs = [(seconds("torch"), seconds("kinfolk")) for _ in range(runs)]
    torch_s, kinfolk_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(kinfolk / torch for torch, kinfolk in pairs)
    print(f"import torch    {torch_s:.2f} s")
    print(f"import kinfolk  {kinfolk_s:.2f} s   ratio {ratio:.3f} (at most {LIMIT})")
    print(f"kinfolk --help  {statistics.median(help_seconds() for _ in range(3)):.2f} s (at most 1.00)")


if __name__ == "__main__":
    main()
