"""What `auto` means on this machine: accelerator, number of devices, precision, and which process this is.

One process goes ahead: rank zero prepares the data and the run folder, the others wait for its word, and end when it does.

Lightning starts the other ranks of a machine by running the same command again, after rank zero has prepared everything; torchrun and
SLURM start all ranks at once, as does a person who starts Lightning on several machines. One file in the run folder serves all: it names
the launch and says whether rank zero is preparing, ready, done or failed. While rank zero lives, it touches the file every few seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kinfolk.errors import KinfolkError, UsageError, printable
from kinfolk.files import first_line, write_text
from kinfolk.training.config import TrainerConfig, nearest

PRECISIONS = ("auto", "32", "32-true", "bf16", "bf16-mixed", "bf16-true", "16", "16-mixed", "16-true", "64", "64-true")
CPU_BFLOAT16 = ("avx512_bf16", "amx_bf16")
"""Instruction sets with which bf16 is faster than 32 bits on a CPU; without them it is emulated, and slower."""


def resolve_trainer(config: TrainerConfig) -> TrainerConfig:
    """`auto` replaced by what it stands for here; the strategy stays, Lightning knows best."""
    accelerator = _accelerator() if config.accelerator == "auto" else {"gpu": "cuda"}.get(config.accelerator, config.accelerator)
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise UsageError("`trainer.accelerator` (=cuda) is not available: torch sees no CUDA device")
    _require_known(config, accelerator)
    devices = config.devices
    if devices == "auto":
        devices = torch.cuda.device_count() if accelerator == "cuda" else 1
    if devices < 1:
        raise UsageError(f"`trainer.devices` (={devices}) must be at least 1")
    for name in config.loggers:
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"`trainer.loggers` holds {name}, which is not installed; install it with `pip install {name}`")
    if config.sync_batchnorm and accelerator == "cpu" and devices * config.num_nodes > 1:
        raise UsageError(
            "`trainer.sync_batchnorm` (=true) needs GPUs: torch has no BatchNorm over several processes on a CPU; leave it out, and each "
            "process has the statistics of its own part of the batch"
        )
    precision = _precision(accelerator) if config.precision == "auto" else config.precision
    compiles = accelerator == "cuda" if config.compile == "auto" else config.compile
    return config.model_copy(update={"accelerator": accelerator, "devices": devices, "precision": precision, "compile": compiles})


def _require_known(config: TrainerConfig, accelerator: str) -> None:
    """Refuses names that Lightning does not know, before anything of an older run is touched."""
    from lightning.pytorch.accelerators import AcceleratorRegistry
    from lightning.pytorch.strategies import StrategyRegistry

    for key, value, names in (
        ("precision", config.precision, PRECISIONS),
        ("accelerator", accelerator, AcceleratorRegistry.available_accelerators()),
        ("strategy", config.strategy, ("auto", *StrategyRegistry.available_strategies())),
    ):
        if value not in names:
            raise UsageError(f"`trainer.{key}` (={value}) is not known{nearest(value, names)}")


def global_rank(devices: int) -> int:
    """The rank of this process as Lightning's launcher, torchrun, SLURM and the like tell it; 0 where nobody does."""
    environment = os.environ
    if "RANK" in environment:
        return int(environment["RANK"])
    if "LOCAL_RANK" in environment or "NODE_RANK" in environment:
        node = int(environment.get("NODE_RANK", environment.get("GROUP_RANK", "0")))
        return node * devices + int(environment.get("LOCAL_RANK", "0"))
    if "SLURM_NTASKS" in environment and environment.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        return int(environment.get("SLURM_PROCID", "0"))
    return 0


def _accelerator() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _precision(accelerator: str) -> str:
    """bf16 where the hardware has it; half precision is not taken of itself, its range is too small for low temperatures."""
    if accelerator == "cuda":
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    return "bf16-mixed" if accelerator == "cpu" and _cpu_has_bfloat16() else "32-true"


def _cpu_has_bfloat16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return any(name in flags for name in CPU_BFLOAT16)


LAUNCH = "KINFOLK_LAUNCH"
BEAT, SILENCE, FIRST_SIGN, GRACE, OLD = 5.0, 300.0, 1800.0, 10.0, 120.0
"""Seconds between two signs of life; without one after which rank zero counts as gone, where its process can't be seen; until its first;
that a rank has to end by itself when rank zero has gone; and after which a word that is found may be one of an earlier launch."""
NOTICE = 3.0
PREPARING, READY, DONE, FAILED = "preparing", "ready", "done", "failed"
_GONE = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "tcpstore", "socket timeout", "wait timeout")


class RankLeftError(KinfolkError):
    """Another process of the training has ended, so that this one can't go on."""


@contextlib.contextmanager
def together(word: Path, rank: int, several: bool) -> Iterator[None]:
    """Around a whole training of `several` processes: the others learn how rank zero fares, and end when it has ended.

    Args:
        word: the file in the run folder, which all ranks see.
    """
    if not several:
        yield
    elif rank == 0:
        yield from _leading(word)
    else:
        yield from _following(word)


def sign_in(rank: int, several: bool) -> None:
    """Leaves the number of rank zero's process where ranks of the same machine see it, before it has touched the run folder."""
    if several and rank == 0 and _external() is not None:
        with contextlib.suppress(OSError):
            _presence().write_text(str(os.getpid()), encoding="utf-8")


@contextlib.contextmanager
def telling_others(word: Path, rank: int, several: bool) -> Iterator[None]:
    """Around what rank zero alone checks before the folder is its own: if it refuses, the others hear of it. The note is removed again."""
    try:
        yield
    except Exception as error:
        if several and rank == 0 and _external() is not None and word.parent.is_dir():
            with contextlib.suppress(KinfolkError, OSError):
                _tell(_note(word), FAILED, first_line(error))
                time.sleep(NOTICE)
                _note(word).unlink(missing_ok=True)
        raise


def announce(word: Path) -> None:
    """Rank zero is ready. Processes it starts from now on inherit the name of the launch."""
    _tell(word, READY)


def wait_for(word: Path, first_sign: float = FIRST_SIGN) -> None:
    """Returns as soon as rank zero of this launch is ready; raises when it has failed, or gives no sign of life."""
    watch = _Watch(word, first_sign)
    while not watch.ready:
        gone = watch.gone()
        if gone is not None:
            raise RankLeftError(gone)
        time.sleep(0.1)


@contextlib.contextmanager
def naming_lost_ranks(kept: Callable[[], str]) -> Iterator[None]:
    """Turns the message of a collective that another process has left into a sentence. `kept` says what there is to go on from."""
    try:
        yield
    except KinfolkError:
        raise
    except (RuntimeError, OSError) as error:
        if not any(word in str(error).lower() for word in _GONE):
            raise
        raise RankLeftError(f"another process of this training has ended, and its own message says why; {kept()}") from error


def _leading(word: Path) -> Iterator[None]:
    if _external() is None:
        os.environ[LAUNCH] = uuid.uuid4().hex
    over = threading.Event()
    with contextlib.suppress(KinfolkError):  # a folder that can't be written to is told of where the run is written
        _tell(word, PREPARING)
    beating = threading.Thread(target=_beat, args=(word, over), name="kinfolk-signs-of-life", daemon=True)
    beating.start()
    state, message = FAILED, "it was ended"
    try:
        yield
        state = DONE
    except BaseException as error:
        message = first_line(error)
        raise
    finally:
        over.set()
        with contextlib.suppress(OSError):
            _presence().unlink()
        if word.parent.is_dir():
            with contextlib.suppress(KinfolkError):
                _tell(word, state, message)


def _following(word: Path) -> Iterator[None]:
    over = threading.Event()
    threading.Thread(target=_end_with, args=(word, over), name="kinfolk-watch", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _beat(word: Path, over: threading.Event) -> None:
    while not over.wait(BEAT):
        with contextlib.suppress(OSError):
            os.utime(word)


def _end_with(word: Path, over: threading.Event) -> None:
    """Ends this process when rank zero has gone while this one waits for it, as in a collective that has no end."""
    watch = _Watch(word, FIRST_SIGN)
    while not over.wait(1.0):
        if not watch.ready:  # `wait_for` is at it
            watch.gone()
            continue
        gone = watch.gone()
        if gone is not None and not over.wait(GRACE):
            sys.stderr.write(f"Error: {printable(gone)}\n")
            sys.stderr.flush()
            os._exit(1)


class _Watch:
    """What can be seen of rank zero."""

    def __init__(self, word: Path, first_sign: float) -> None:
        self.word, self.first_sign, self.ready = word, first_sign, False
        self._sign: tuple[int, str] | None = None
        self._seen = time.monotonic()
        self._since = time.time() - OLD

    def gone(self) -> str | None:
        """Why rank zero counts as gone; None as long as it does not."""
        state = self._state()
        if state is None:
            if self._left_early():
                return "rank zero has ended without a word, as if killed, before it had begun"
            if time.monotonic() - self._seen > self.first_sign:
                return f"rank zero has not said in {self.word} that it has begun; all ranks must see the same folder"
            return None
        self.ready = self.ready or state["state"] in (READY, DONE)
        if state["state"] == FAILED:
            return f"rank zero has ended: {state.get('message')}"
        if state["state"] == DONE:
            return None
        if state["host"] == socket.gethostname():
            return None if _alive(state) else "rank zero has ended without a word, as if killed"
        if time.monotonic() - self._seen > SILENCE:
            return f"rank zero, on {state['host']}, has given no sign of life for {SILENCE / 60:.0f} minutes"
        return None

    def _left_early(self) -> bool:
        """Whether rank zero has signed in on this machine and is not there any more."""
        try:
            pid, signed = int(_presence().read_text(encoding="utf-8")), _presence().stat().st_mtime
        except (OSError, ValueError):
            return False
        return signed > self._since and not _is_running(pid)

    def _state(self) -> dict[str, Any] | None:
        place = _note(self.word) if _note(self.word).exists() else self.word
        try:
            text, touched = place.read_text(encoding="utf-8"), place.stat().st_mtime_ns
            state = json.loads(text)
        except (OSError, ValueError):
            return None
        if not isinstance(state, dict) or state.get("launch") != _name():
            return None
        if self._sign is None and time.time() - touched / 1e9 > OLD and not _alive(state):
            return None
        if (touched, text) != self._sign:
            self._sign, self._seen = (touched, text), time.monotonic()
        return state


def _tell(word: Path, state: str, message: str = "") -> None:
    about = {"launch": _name(), "state": state, "message": message, "host": socket.gethostname(), "pid": os.getpid()}
    write_text(word, json.dumps(about))


def _note(word: Path) -> Path:
    """Beside `word`, and of this launch alone: the folder may belong to another."""
    return word.with_name(f"{word.name}-{hashlib.blake2b(_name().encode(), digest_size=6).hexdigest()}")


def _presence() -> Path:
    """Of this launch and this user, on this machine."""
    name = hashlib.blake2b(f"{_name()} {os.getuid() if hasattr(os, 'getuid') else ''}".encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"kinfolk-launch-{name}"


def _alive(state: dict[str, Any]) -> bool:
    """Whether a state says that rank zero is at work; of another machine its word is taken."""
    at_work = state["state"] in (PREPARING, READY)
    return at_work and (state["host"] != socket.gethostname() or _is_running(int(state["pid"])))


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    with contextlib.suppress(OSError, IndexError):  # a zombie has ended, too
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in ("Z", "X")
    return True


def _external() -> str | None:
    """The name that torchrun or SLURM gave to this launch, or the meeting point of Lightning's on several machines."""
    environment = os.environ
    if "TORCHELASTIC_RUN_ID" in environment:
        return f"torchrun-{environment['TORCHELASTIC_RUN_ID']}-{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if "SLURM_STEP_ID" in environment and "SLURM_JOB_ID" in environment:
        restarts = environment.get("SLURM_RESTART_COUNT", "0")
        return f"slurm-{environment['SLURM_JOB_ID']}-{environment['SLURM_STEP_ID']}-{restarts}"
    if LAUNCH not in environment and all(name in environment for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")):
        return f"lightning-{environment['MASTER_ADDR']}-{environment['MASTER_PORT']}"
    return None


def _name() -> str:
    return _external() or os.environ.get(LAUNCH, "")
