"""What `auto` means on this machine, and how ranks start and stop together."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, final

import torch
from torch._C._distributed_c10d import TCPStore

from kinfolk.errors import KinfolkError, UsageError, warn
from kinfolk.files import first_line
from kinfolk.training.config import TrainerConfig

CPU_BFLOAT16 = ("avx512_bf16", "amx_bf16")
"""Instruction sets without which bf16 is emulated on a CPU."""


def resolve_trainer(config: TrainerConfig) -> TrainerConfig:
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
            warn(f"one of {devices} GPUs is used, because this is a notebook; {terminal}")
            devices = 1
    if devices < 1:
        raise UsageError(f"`trainer.devices` (={devices}) must be at least 1")
    several = devices * config.num_nodes > 1
    if several and in_notebook():
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
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the user chose it for one backend, as torch allows from 2.9 on
        yield
        return
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


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
    environment = os.environ
    if "RANK" in environment:
        return int(environment["RANK"])
    if "LOCAL_RANK" in environment or "NODE_RANK" in environment:
        node = int(environment.get("NODE_RANK", environment.get("GROUP_RANK", "0")))
        return node * devices + int(environment.get("LOCAL_RANK", "0"))
    return int(environment.get("SLURM_PROCID", "0")) if _is_slurm_task() else 0


def _is_slurm_task() -> bool:
    is_shell = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return "SLURM_NTASKS" in os.environ and not is_shell


PREPARED = "KINFOLK_PREPARED"
"""Set for the processes that Lightning starts: the number of the last training of this program that
rank zero has prepared."""
START, PREPARATION = timedelta(minutes=5), timedelta(days=2)
"""How long a rank waits for rank zero to start, and to prepare the data."""
BEAT, GRACE = 2.0, 60.0
"""Seconds between two looks for rank zero, and for a rank to end by itself after it."""
_GONE = ("gloo", "nccl", "connection", "broken pipe", "tcpstore", "socket timeout", "wait timeout")
"""Words in the error of a collective that another process has left."""
_trainings = itertools.count(1)


class RankLeftError(KinfolkError):
    """Another process of the training has ended, so this one cannot continue."""


@final
class Rendezvous:
    """A context manager around the training, where ranks wait until rank zero has prepared data and
    run folder: the TCPStore of the process group, which breaks off when rank zero ends. Rank zero
    needs none if it starts the others itself, after the preparation."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.number, self._over = rank, next(_trainings), threading.Event()
        self._key = f"kinfolk/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{self.number}"
        self._seen = [f"{self._key}/{other}" for other in range(1, world_size)]
        self._store: TCPStore | None = None

    def __enter__(self) -> Rendezvous:
        address = _address()
        if address is not None:
            by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # of torchrun
            hosts = self.rank == 0 and not by_agent
            options: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": True}
            with _explain_lost_store("rank zero cannot be reached"):
                self._store = TCPStore(*address, None, hosts, START, **options)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._over.set()
        if error is None or self.rank > 0 or self._store is None:
            return
        with contextlib.suppress(RuntimeError):
            if not self._store.check([self._key]):  # while the others start or wait
                self._store.set(self._key, f"rank zero has ended: {first_line(error)}")
                self._store.wait(self._seen, timedelta(seconds=10))

    def mark_ready(self) -> None:
        os.environ[PREPARED] = str(self.number)
        if self._store is not None and self.rank == 0:
            self._store.set(self._key, "")

    def wait(self) -> None:
        """Waits for rank zero to be ready. From then on this process ends if rank zero does, which
        a collective on a GPU might not notice."""
        if self._store is None:
            return
        if int(os.environ.get(PREPARED, 0)) < self.number:
            with _explain_lost_store("rank zero has ended, and its own message says why"):
                self._store.wait([self._key], PREPARATION)
                failure = self._store.get(self._key).decode()
                self._store.set(self._seen[self.rank - 1], "")
            if failure:
                raise RankLeftError(failure)
            self.mark_ready()
        threading.Thread(target=self._exit_with_rank_zero, daemon=True).start()

    def _exit_with_rank_zero(self) -> None:
        assert self._store is not None
        with contextlib.suppress(RuntimeError):  # the connection is lost
            while not self._over.wait(BEAT):
                self._store.check([self._key])
        if not self._over.wait(GRACE):
            print("Error: rank zero has ended", file=sys.stderr, flush=True)  # noqa: T201
            os._exit(1)


@contextlib.contextmanager
def _explain_lost_store(reason: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLeftError(f"{reason} ({first_line(error)})") from error


def _address() -> tuple[str, int] | None:
    if _is_slurm_task():
        from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

        slurm = SLURMEnvironment()
        return slurm.main_address, slurm.main_port
    port = os.environ.get("MASTER_PORT")
    return None if port is None else (os.environ.get("MASTER_ADDR", "127.0.0.1"), int(port))


@contextlib.contextmanager
def explain_lost_ranks(describe_saved: Callable[[], str]) -> Iterator[None]:
    try:
        yield
    except KinfolkError:
        raise
    except (RuntimeError, OSError) as error:
        if not any(word in str(error).lower() for word in _GONE):
            raise
        raise RankLeftError(
            "another process of this training has ended, and its own message says why;"
            f" {describe_saved()}"
        ) from error
