"""Puts one fault at a time into a copy of the source, and runs the tests that should notice it.

    python -m tests.faults.seeded                 # all; `make seeded-faults`
    python -m tests.faults.seeded --only queue    # faults whose name contains "queue"

A fault is named by a fragment of the source that occurs once in its file; the script ends with a
sentence if it does not. The tests must pass on an unchanged copy first. The exit code is 1 unless
every fault is caught.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PRELOADED = ("torch", "torch.distributed", "pytest", "sklearn.datasets", "faiss")
"""Imported once; each run of tests is a fork. kinfolk is not among them."""
CAUGHT = 1
"""The exit code of pytest if tests failed; others mean that it could not run them."""


class Fault(NamedTuple):
    """What is wrong, the file below src/kinfolk, the fragment and what replaces it, and the tests
    that should notice."""

    name: str
    file: str
    right: str
    wrong: str
    tests: Sequence[str]


FAULTS = (
    # the engine
    Fault(
        "engine: the log-sum-exp's gradient lacks the temperature",
        "contrast.py",
        "x * (scale * inv_t)",
        "x * scale",
        ["tests/test_contrast.py"],
    ),
    Fault(
        "engine: the loss is divided by the anchors of one rank",
        "contrast.py",
        "num_anchors or len(pairs.anchors)",
        "len(pairs.anchors)",
        ["tests/test_distributed.py"],
    ),
    Fault(
        "engine: reweighted kin keep the weight that they should lose",
        "contrast.py",
        "1 - policy.kin_weight",
        "policy.kin_weight",
        ["tests/test_contrast_weights.py"],
    ),
    # losses
    Fault(
        "losses: the moving average forgets instead of remembering",
        "objectives/sogclr.py",
        "old_b1 + (1 - gamma).log(), log_g_bV + gamma.log()",
        "old_b1 + gamma.log(), log_g_bV + (1 - gamma).log()",
        ["tests/objectives/test_sogclr.py"],
    ),
    Fault(
        "losses: hardness has the opposite sign",
        "objectives/ntxent.py",
        "scale=1 + hardness",
        "scale=1 - hardness",
        ["tests/objectives/test_ntxent_debiased.py"],
    ),
    # detectors
    Fault(
        "detectors: thresholds step in the wrong direction",
        "detectors/thresholds.py",
        "(state_bF[:, 0] - step_b).clamp(-1, 1)",
        "(state_bF[:, 0] + step_b).clamp(-1, 1)",
        ["tests/detectors/test_thresholds.py", "tests/detectors/test_glofnd.py"],
    ),
    Fault(
        "detectors: FNC takes the next smaller similarity as its k-th",
        "detectors/fnc.py",
        "gather(1, k_R1 - 1)",
        "gather(1, k_R1.clamp(max=most - 1))",
        ["tests/detectors/test_fnc.py"],
    ),
    # stores
    Fault(
        "stores: the queue's pointer is off by one",
        "stores/queue.py",
        "self.pointer.add_(number)",
        "self.pointer.add_(number - 1)",
        ["tests/stores/test_queue.py"],
    ),
    Fault(
        "stores: the queue keeps the ids of the rows before",
        "stores/queue.py",
        "self.ids[places] = unless_broken(is_finite, ids[-self.size :], self.ids[places])",
        "self.ids[places] = unless_broken(is_finite, self.ids[places], self.ids[places])",
        ["tests/stores/test_queue.py"],
    ),
    Fault(
        "stores: the bank's momentum weighs the new embedding",
        "stores/memory_bank.py",
        "torch.lerp(mean_bD, old_bD, self.momentum)",
        "torch.lerp(old_bD, mean_bD, self.momentum)",
        ["tests/stores/test_memory_bank.py"],
    ),
    Fault(
        "stores: of several rows of a sample the largest is stored, not the mean",
        "stores/per_sample.py",
        'rows, "mean", include_self=False',
        'rows, "amax", include_self=False',
        ["tests/stores/test_per_sample.py"],
    ),
    Fault(
        "stores: a field is not restored from a state dict",
        "stores/per_sample.py",
        "getattr(self, name).copy_(saved)",
        "getattr(self, name).clone().copy_(saved)",
        ["tests/stores/test_per_sample.py", "tests/stores/test_per_sample_saving.py"],
    ),
    # ranks
    Fault(
        "ranks: the gradient of other ranks is dropped",
        "distributed.py",
        "_reduce_scatter(own, grad.contiguous())",
        "own.copy_(grad.chunk(world_size())[ctx.rank])",
        ["tests/test_collectives_per_step.py"],
    ),
    Fault(
        "ranks: the loss's gradient is not scaled for DistributedDataParallel",
        "distributed.py",
        "return grad * world_size()",
        "return grad",
        ["tests/test_distributed.py"],
    ),
    Fault(
        "ranks: unequal batches are cut by the sizes of other ranks",
        "distributed.py",
        "for part, size in zip(rows, sizes, strict=True)",
        "for part, size in zip(rows, sizes[::-1], strict=True)",
        ["tests/test_distributed.py"],
    ),
    # frameworks
    Fault(
        "frameworks: the momentum encoder takes the weight of the other",
        "frameworks/moco.py",
        "torch._foreach_lerp_(slow, fast, 1 - self.momentum)",
        "torch._foreach_lerp_(slow, fast, self.momentum)",
        ["tests/frameworks/test_moco_momentum.py", "tests/frameworks/test_moco.py"],
    ),
    # resume
    Fault(
        "resume: an epoch begins anew instead of where it stopped",
        "training/loader.py",
        'state["epoch"], state["position"]',
        'state["epoch"], 0',
        ["tests/training/test_loader.py"],
    ),
    Fault(
        "resume: all ranks read the part of the first",
        "training/loader.py",
        "start = step * self.batch_size + self.rank * share",
        "start = step * self.batch_size",
        ["tests/training/test_loader.py"],
    ),
    Fault(
        "resume: draws repeat those of the first step",
        "stores/per_sample.py",
        "step_generator(int(self.seed), int(self.count))",
        "step_generator(int(self.seed), 0)",
        ["tests/stores/test_memory_bank_draw.py"],
    ),
    Fault(
        "resume: the checkpoint counts the epoch in progress as finished",
        "training/checkpoint.py",
        "self._finished = trainer.current_epoch + 1",
        "self._finished = trainer.current_epoch + 2",
        ["tests/training/test_checkpoint.py", "tests/training/test_checkpoint_resume.py"],
    ),
)


def copy_source(folder: Path) -> None:
    for name in ("src", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)


def insert(fault: Fault, folder: Path) -> None:
    path = folder / "src" / "kinfolk" / fault.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(fault.right, fault.wrong), encoding="utf-8")


def missing() -> list[str]:
    """A sentence for every fault whose fragment does not occur exactly once."""
    found = []
    for fault in FAULTS:
        number = (ROOT / "src" / "kinfolk" / fault.file).read_text("utf-8").count(fault.right)
        if number != 1:
            found.append(f"{fault.file} has {fault.right!r} {number} times, not once: {fault.name}")
    return found


def run_tests(folder: Path, tests: Sequence[str], log: Path) -> int:
    """The exit code of pytest for the kinfolk in this folder, in a process of its own."""
    process = multiprocessing.get_context("fork").Process(target=_test, args=(folder, tests, log))
    process.start()
    process.join()
    return process.exitcode or 0


def _test(folder: Path, tests: Sequence[str], log: Path) -> None:
    import pytest

    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "kinfolk")]:
        del sys.modules[name]
    sys.path[:0] = [str(folder / "src"), str(folder)]
    os.environ["PYTHONPATH"] = os.pathsep.join((str(folder / "src"), str(folder)))
    os.chdir(folder)
    sys.dont_write_bytecode = True
    with log.open("w", encoding="utf-8") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])
    import kinfolk

    assert Path(kinfolk.__file__).is_relative_to(folder), kinfolk.__file__
    os._exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="faults whose name contains this")
    given = parser.parse_args()
    gone = missing()
    if gone:
        sys.exit("\n".join(gone))
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            __import__(name)
    chosen, caught = [fault for fault in FAULTS if given.only in fault.name], 0
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        copy_source(place / "right")
        tests = sorted({test for fault in chosen for test in fault.tests})
        if run_tests(place / "right", tests, place / "log"):
            sys.exit((place / "log").read_text()[-4000:] + "\nthe tests fail without any fault")
        for number, fault in enumerate(chosen):
            folder = place / str(number)
            copy_source(folder)
            insert(fault, folder)
            code = run_tests(folder, fault.tests, place / "log")
            caught += code == CAUGHT
            answer = "caught" if code == CAUGHT else f"NOT CAUGHT (pytest ended with {code})"
            sys.stdout.write(f"{answer:>8}  {fault.name}\n")
            sys.stdout.flush()
            shutil.rmtree(folder)
    sys.stdout.write(f"{caught} of {len(chosen)} faults caught\n")
    sys.exit(caught < len(chosen))


if __name__ == "__main__":
    main()
