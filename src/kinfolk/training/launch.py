"""What `auto` means on this machine, and how several ranks start and stop together.

Rank zero prepares data and run folder; the others wait until it is ready, and exit when it exits.
They read one status file in the run folder: it names the launch, says whether rank zero is
preparing, ready, done or failed, and is touched every few seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from kinfolk.errors import KinfolkError, KinfolkWarning, UsageError, printable
from kinfolk.files import first_line, is_running, write_text
from kinfolk.training.config import TrainerConfig

CPU_BFLOAT16 = ("avx512_bf16", "amx_bf16")
"""Instruction sets without which bf16 is emulated on a CPU."""


def resolve_trainer(config: TrainerConfig) -> TrainerConfig:
    """Replaces `auto` by the values for this machine, except for the strategy."""
    accelerator = "cuda" if config.accelerator == "gpu" else config.accelerator
    if accelerator == "auto":
        has_mps = not torch.cuda.device_count() and torch.backends.mps.is_available()
        accelerator = "cuda" if torch.cuda.device_count() else "mps" if has_mps else "cpu"
    elif accelerator == "cuda" and not torch.cuda.device_count():
        raise UsageError(
            "`trainer.accelerator` (=cuda) is not available: torch sees no CUDA device"
        )
    on_gpu, devices = accelerator == "cuda", config.devices
    terminal = "run `kinfolk train` in a terminal to use several"
    if devices == "auto":
        devices = torch.cuda.device_count() if on_gpu else 1
        if devices > 1 and in_notebook():
            message = f"one of {devices} GPUs is used, because this is a notebook; {terminal}"
            warnings.warn(message, KinfolkWarning, stacklevel=2)
            devices = 1
    if devices < 1:
        raise UsageError(f"`trainer.devices` (={devices}) must be at least 1")
    several = devices * config.num_nodes > 1
    if several and config.strategy == "auto" and in_notebook():
        raise UsageError(f"`trainer.devices` (={devices}) must be 1 in a notebook; {terminal}")
    for name in config.loggers:
        if importlib.util.find_spec(name) is None:
            raise UsageError(
                f"`trainer.loggers` holds {name}, which is not installed; run `pip install {name}`"
            )
    if config.sync_batchnorm is True and accelerator == "cpu" and several:
        raise UsageError(
            "`trainer.sync_batchnorm` (=true) needs GPUs: torch has no BatchNorm over several"
            " processes on a CPU; leave it out"
        )
    if config.compile_encoder is True and config.chunk_size is not None:
        raise UsageError(
            "`trainer.compile_encoder` (=true) does not work with `trainer.chunk_size`; leave one"
            " of them out"
        )
    precision = config.precision
    if precision == "auto":
        if on_gpu:
            has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            has_bfloat16 = accelerator == "cpu" and _cpu_has_bfloat16()
        precision = "bf16-mixed" if has_bfloat16 else "32-true"
    has_triton = config.chunk_size is None and importlib.util.find_spec("triton") is not None
    automatic = {
        "matmul_precision": "highest" if precision.startswith("32") else "high",
        "compile": on_gpu,
        "compile_encoder": on_gpu and has_triton,
        "sync_batchnorm": on_gpu and several,
    }
    chosen = {key: value for key, value in automatic.items() if getattr(config, key) == "auto"}
    resolved = {"accelerator": accelerator, "devices": devices, "precision": precision}
    return config.model_copy(update={**chosen, **resolved})


@contextlib.contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Sets the precision of products of float32 matrices (`trainer.matmul_precision`)."""
    by_backend: list[tuple[Any, str]] = []
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the user chose it for one backend, as torch allows from 2.9 on
        before, backends = "highest", (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
        by_backend = [(backend, backend.fp32_precision) for backend in backends]
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        for backend, chosen in by_backend:
            backend.fp32_precision = chosen


def in_notebook() -> bool:
    """Whether Lightning would fork further processes."""
    from lightning.fabric.utilities.imports import _IS_INTERACTIVE

    return bool(_IS_INTERACTIVE)


def _cpu_has_bfloat16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return any(name in flags for name in CPU_BFLOAT16)


def global_rank(devices: int) -> int:
    """By the environment variables of Lightning, torchrun or SLURM; 0 without them."""
    environment = os.environ
    if "RANK" in environment:
        return int(environment["RANK"])
    if "LOCAL_RANK" in environment or "NODE_RANK" in environment:
        node = int(environment.get("NODE_RANK", environment.get("GROUP_RANK", "0")))
        return node * devices + int(environment.get("LOCAL_RANK", "0"))
    interactive = environment.get("SLURM_JOB_NAME") in ("bash", "interactive")
    if "SLURM_NTASKS" in environment and not interactive:
        return int(environment.get("SLURM_PROCID", "0"))
    return 0


LAUNCH = "KINFOLK_LAUNCH"
# seconds
BEAT = 5.0  # between two heartbeats
SILENCE = 300.0  # without a heartbeat until a rank zero on another machine counts as gone
FIRST_SIGN = 1800.0  # until the first heartbeat
GRACE = 10.0  # that a rank has to exit by itself after rank zero
SPREAD = 2.0  # within which a launcher starts the ranks
PREPARING, READY, DONE, FAILED = "preparing", "ready", "done", "failed"
_GONE = ("gloo", "nccl", "connection", "broken pipe", "tcpstore", "socket timeout", "wait timeout")
"""Words in the error of a collective that another process has left."""


class RankLeftError(KinfolkError):
    """Another process of the training has ended, so this one cannot continue."""


@contextlib.contextmanager
def supervise(status_file: Path, rank: int, several: bool) -> Iterator[None]:
    """Rank zero reports its state in `status_file`; the other ranks exit when it does."""
    if not several:
        yield
        return
    if rank == 0 and _external_name() is None:
        os.environ[LAUNCH] = uuid.uuid4().hex
    if rank == 0:
        _try_to_write(status_file, PREPARING)
    over, state, message = threading.Event(), FAILED, "it was ended"
    work = _heartbeat if rank == 0 else _exit_with_rank_zero
    threading.Thread(target=work, args=(status_file, over), daemon=True).start()
    try:
        yield
        state = DONE
    except BaseException as error:
        message = first_line(error)
        raise
    finally:
        over.set()
        if rank == 0:
            with contextlib.suppress(OSError):
                _pid_file().unlink()
            if status_file.parent.is_dir():
                _try_to_write(status_file, state, message)


def register_rank_zero(rank: int, several: bool) -> None:
    """Writes the process id of rank zero where ranks of the same machine find it early."""
    if several and rank == 0 and _external_name() is not None:
        with contextlib.suppress(OSError):
            _pid_file().write_text(str(os.getpid()), encoding="utf-8")


def mark_ready(status_file: Path) -> None:
    """From now on rank zero starts processes, which inherit the name of the launch."""
    _write_status(status_file, READY)


def wait_for_rank_zero(status_file: Path, first_sign: float = FIRST_SIGN) -> None:
    """Raises if rank zero has failed or sends no sign."""
    rank_zero = _RankZero(status_file, first_sign)
    while not rank_zero.ready:
        if (why_gone := rank_zero.why_gone()) is not None:
            raise RankLeftError(why_gone)
        time.sleep(0.1)


@contextlib.contextmanager
def explain_lost_ranks(describe_saved: Callable[[], str]) -> Iterator[None]:
    """Turns the error of a collective that another process has left into a sentence that ends with
    `describe_saved()`. torchrun's SIGTERM, which would cut it off, is ignored meanwhile."""
    before, ended = None, False
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, _end_unless_failing)
    try:
        yield
    except KinfolkError:
        raise
    except (RuntimeError, OSError) as error:
        if not any(word in str(error).lower() for word in _GONE):
            raise
        ended = True
        raise RankLeftError(
            "another process of this training has ended, and its own message says why;"
            f" {describe_saved()}"
        ) from error
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN if ended else before)


def _end_unless_failing(number: int, frame: FrameType | None) -> None:
    if sys.exc_info()[0] is None:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _heartbeat(status_file: Path, over: threading.Event) -> None:
    while not over.wait(BEAT):
        with contextlib.suppress(OSError):
            os.utime(status_file)


def _exit_with_rank_zero(status_file: Path, over: threading.Event) -> None:
    rank_zero = _RankZero(status_file, FIRST_SIGN)
    while not over.wait(1.0):
        was_ready, why_gone = rank_zero.ready, rank_zero.why_gone()
        # before it is ready, `wait_for_rank_zero` raises the error
        if was_ready and why_gone is not None and not over.wait(GRACE):
            print(f"Error: {printable(why_gone)}", file=sys.stderr, flush=True)  # noqa: T201
            os._exit(1)


class _RankZero:
    """The state of rank zero as another rank sees it. Names of launches repeat: a file last touched
    before this process was started belongs to an earlier one."""

    def __init__(self, status_file: Path, first_sign: float) -> None:
        self.status_file, self.first_sign, self.ready = status_file, first_sign, False
        self._sign: tuple[int, str] | None = None
        self._seen = time.monotonic()
        self._since = 0.0 if _external_name() is None else _process_start() - SPREAD

    def why_gone(self) -> str | None:
        state, silence = self._state(), time.monotonic() - self._seen
        if state is None:
            if self._died_early():
                return "rank zero has ended without a message, as if killed, before it had started"
            if silence > self.first_sign:
                return (
                    f"rank zero has not written {self.status_file}; all ranks must see the same"
                    " folder"
                )
            return None
        self.ready = self.ready or state["state"] in (READY, DONE)
        if state["state"] == FAILED:
            return f"rank zero has ended: {state.get('message')}"
        if state["state"] == DONE:
            return None
        if state["host"] == socket.gethostname():
            gone = not is_running(int(state["pid"]))
            return "rank zero has ended without a message, as if killed" if gone else None
        if silence > SILENCE:
            return f"rank zero, on {state['host']}, has sent no heartbeat for {SILENCE:.0f} seconds"
        return None

    def _died_early(self) -> bool:
        try:
            pid, signed = int(_pid_file().read_text(encoding="utf-8")), _pid_file().stat().st_mtime
        except (OSError, ValueError):
            return False
        return signed > self._since and not is_running(pid)

    def _state(self) -> dict[str, Any] | None:
        try:
            text = self.status_file.read_text(encoding="utf-8")
            touched = self.status_file.stat().st_mtime_ns
            state = json.loads(text)
        except (OSError, ValueError):
            return None
        is_ours = isinstance(state, dict) and state.get("launch") == _launch_name()
        if not is_ours or touched / 1e9 < self._since:
            return None
        if (touched, text) != self._sign:
            self._sign, self._seen = (touched, text), time.monotonic()
        found: dict[str, Any] = state
        return found


def _process_start() -> float:
    """When this process was started, or without /proc when this module was imported."""
    try:
        status = Path("/proc/self/stat").read_text(encoding="utf-8")
        seconds = int(status.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + seconds
    except (OSError, AttributeError, ValueError, IndexError):
        return _IMPORTED


_IMPORTED = time.time()


def _write_status(status_file: Path, state: str, message: str = "") -> None:
    place = {"host": socket.gethostname(), "pid": os.getpid()}
    about = {"launch": _launch_name(), "state": state, "message": message, **place}
    write_text(status_file, json.dumps(about))


def _try_to_write(status_file: Path, state: str, message: str = "") -> None:
    # an unwritable folder is reported where the run is written
    with contextlib.suppress(KinfolkError, OSError):
        _write_status(status_file, state, message)


def _pid_file() -> Path:
    name = f"{_launch_name()} {getattr(os, 'getuid', int)()}"
    digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"kinfolk-launch-{digest}"


def _external_name() -> str | None:
    """The name of this launch by torchrun, SLURM or the address of Lightning's."""
    get = os.environ.get
    if torchrun := get("TORCHELASTIC_RUN_ID"):
        return f"torchrun-{torchrun}-{get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if "SLURM_STEP_ID" in os.environ and "SLURM_JOB_ID" in os.environ:
        restarts = get("SLURM_RESTART_COUNT", "0")
        return f"slurm-{get('SLURM_JOB_ID')}-{get('SLURM_STEP_ID')}-{restarts}"
    places = {"NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}
    if LAUNCH not in os.environ and places <= os.environ.keys():
        return f"lightning-{get('MASTER_ADDR')}-{get('MASTER_PORT')}"
    return None


def _launch_name() -> str:
    return _external_name() or os.environ.get(LAUNCH, "")
