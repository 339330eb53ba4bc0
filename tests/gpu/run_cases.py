"""Runs cases of `cases.py` through Triton in a process of its own, and prints what it found.

    TRITON_INTERPRET=1 python -m tests.gpu.run_cases                    # compares with eager
    ARCH=80 python -m tests.gpu.run_cases "NTXent + GloFND"             # compiles for an A100
    TRITON_INTERPRET=1 python -m tests.gpu.run_cases --fault NTXent     # a wrong multiplication

One line of JSON for each case; see `Found`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests.gpu import cases, triton_device

LARGE, MANY = 1024, 4096
"""Batch and data set of the compilation for a GPU: Inductor chooses block sizes by them."""


@dataclass
class Found:
    """What a case showed.

    Args:
        graphs: compiled for each direction of the loss, over all batch sizes.
        launches: kernels of the last step, forward and backward, both directions.
        loss, gradient, state: largest difference to eager, relative to the largest eager value.
        flags: largest difference to eager in the number of flagged pairs.
        registers, spilled, shared: the most of any kernel: of a thread, bytes, bytes.
    """

    name: str
    seconds: float
    graphs: float
    kernels: int
    launches: int
    loss: float = 0.0
    gradient: float = 0.0
    state: float = 0.0
    flags: int = 0
    registers: int = 0
    spilled: int = 0
    shared: int = 0


def difference(got: Tensor, right: Tensor) -> float:
    """Relative to the largest value; infinities and NaN must be in the same places. A number
    without dimensions, such as the gradient of a temperature, is a sum of terms that cancel, so its
    rounding error is larger than its own size suggests."""
    got, right = got.double(), right.double()
    if not bool((got.isfinite() == right.isfinite()).all()):
        return float("inf")
    got, right = got.where(got.isfinite(), 0.0), right.where(right.isfinite(), 0.0)
    least = 1e-3 if right.ndim else 1e-2
    return (
        float((got - right).abs().max() / right.abs().max().clamp(min=least))
        if right.numel()
        else 0.0
    )


def run(name: str) -> Found:
    case, begun, compiled = cases.CASES[name], time.perf_counter(), list[object]()

    def compile_for_gpu(function: Callable[..., Any], **given: Any) -> Any:
        compiled.append(function)
        return compile_(function, **given, backend=triton_device.backend, fullgraph=True)

    torch._dynamo.reset()
    counters.clear()
    triton_device.CUBINS.clear()
    triton_device.MODULES.clear()
    triton_device.LAUNCHES.clear()
    large = not triton_device.INTERPRETED
    if large:
        case = case._replace(sizes=(LARGE,), num_samples=MANY)
    compile_ = torch.compile
    torch.compile = compile_for_gpu  # type: ignore[assignment]
    try:
        got, state = cases.steps(case, compile=True)
    finally:
        torch.compile = compile_
    modules = triton_device.MODULES
    if not modules or not all("async_compile.triton(" in module for module in modules):
        raise RuntimeError("no Triton was generated")
    graphs = counters["stats"]["unique_graphs"] / len(compiled)
    launches = sum(triton_device.LAUNCHES.values()) // len(case.sizes)
    shown = Found(name, 0.0, graphs, len(triton_device.LAUNCHES), launches)
    if large:
        kernels = triton_device.CUBINS
        shown.kernels, shown.registers = len(kernels), max(kernel.registers for kernel in kernels)
        shown.spilled, shown.shared = (
            max(getattr(k, name) for k in kernels) for name in ("spilled", "shared")
        )
    else:
        expected, right = cases.steps(case, compile=False)
        for one, other in zip(got, expected, strict=True):
            shown.loss = max(shown.loss, difference(one.loss, other.loss))
            pairs = zip(one.gradients, other.gradients, strict=True)
            shown.gradient = max(shown.gradient, *(difference(*pair) for pair in pairs))
            shown.flags = max(shown.flags, abs(one.flagged - other.flagged))
        shown.state = max([difference(state[key], right[key]) for key in right], default=0.0)
    shown.seconds = round(time.perf_counter() - begun, 1)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--fault", action="store_true", help="make a multiplication wrong")
    parser.add_argument("names", nargs="*", help="all cases by default")
    given = parser.parse_args()
    triton_device.FAULTY = given.fault
    torch.set_num_threads(1)
    for name in given.names or cases.CASES:
        try:
            found = asdict(run(name))
        except Exception as error:  # the other cases still run
            found = {"name": name, "error": f"{type(error).__name__}: {error}"[:2000]}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
