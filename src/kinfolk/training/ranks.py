"""One process goes ahead: rank zero prepares the data and the run folder, the others wait for its word.

Lightning starts the other ranks of a machine by running the same command again, after rank zero has prepared everything; torchrun and
SLURM start all ranks at once, as does a person who starts Lightning on several machines. A file with the name of the launch serves all.
"""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

from kinfolk.errors import KinfolkError
from kinfolk.files import write_text

LAUNCH = "KINFOLK_LAUNCH"
PATIENCE = 24 * 3600.0


def announce(word: Path) -> None:
    """Rank zero is ready. Processes it starts from now on inherit the name of the launch."""
    if _external() is None:
        os.environ[LAUNCH] = uuid.uuid4().hex
    write_text(word, _name())


def wait_for(word: Path, patience: float = PATIENCE) -> None:
    """Returns as soon as rank zero of this launch is ready."""
    deadline = time.monotonic() + patience
    while not (word.is_file() and word.read_text(encoding="utf-8") == _name()):
        if time.monotonic() > deadline:
            raise KinfolkError(f"rank zero has not said in {word} that the data is ready; all ranks must see the same folder")
        time.sleep(0.1)


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
