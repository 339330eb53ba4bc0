"""The program of a decoding worker: reads places of images from standard input, writes pixels to a
shared file and what it found to standard output, as pickles.

It is started by its path instead of by `multiprocessing`, which would import the user's main script
again in every worker (and run it if it has no `__main__` guard), and PyTorch too.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import pickle
import signal
import sys
from types import ModuleType


def main() -> None:
    """Runs until standard input ends, which also happens when the parent dies.

    A request is a list of places, a file that the parent maps too, and the row of it from which on
    pixels are written; the answers have no pixels.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    sys.path[:], *setting = json.loads(sys.argv[1])
    size = setting[0] * setting[1] * 3
    boards: dict[str, mmap.mmap] = {}
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a decoder prints must not mix with the answers
    decode = _load_decode()
    answers.write(b"ready\n")
    answers.flush()
    with decode.strict_pillow():
        while True:
            try:
                places, board, first = pickle.load(requests)
            except EOFError:
                return
            if board not in boards:
                with open(board, "r+b") as file:
                    boards[board] = mmap.mmap(file.fileno(), 0)
            found = []
            for row, place in enumerate(places, first):
                read = decode.read_file(place, *setting)
                if read.pixels is not None:
                    boards[board][row * size : (row + 1) * size] = read.pixels.reshape(-1).data
                found.append(tuple(read._replace(pixels=None)))
            pickle.dump(found, answers, protocol=5)
            answers.flush()


def _load_decode() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "kinfolk_decode", os.path.join(os.path.dirname(os.path.abspath(__file__)), "decode.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kinfolk_decode"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
