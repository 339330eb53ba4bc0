"""What `auto` means on this machine: accelerator, number of devices, precision, and which process this is."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import torch

from kinfolk.errors import UsageError
from kinfolk.training.keys import nearest
from kinfolk.training.sections import TrainerConfig

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
