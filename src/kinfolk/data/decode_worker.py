"""The program of a decoding worker: file paths come in, pixels go out, as pickles on standard input and output.

Started by path and not with `multiprocessing`: that would import the user's main script again in every worker (and run it, where it has
no `__main__` guard), and PyTorch with it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import signal
import sys
from types import ModuleType


def main() -> None:
    """Serves until standard input ends, which it also does when the parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    sys.path[:], height, width, pixel_cap = json.loads(sys.argv[1])
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a decoder prints must not get between the answers
    decode = _load_decode()
    answers.write(b"ready\n")
    answers.flush()
    with decode.strict_pillow():
        while True:
            try:
                paths = pickle.load(requests)
            except EOFError:
                return
            pickle.dump([tuple(decode.read_file(path, height, width, pixel_cap)) for path in paths], answers, protocol=5)
            answers.flush()


def _load_decode() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kinfolk_decode", os.path.join(os.path.dirname(os.path.abspath(__file__)), "decode.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kinfolk_decode"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
