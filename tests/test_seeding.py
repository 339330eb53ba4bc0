from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kinfolk.seeding import derive_seed, generator


def test_same_key_same_stream() -> None:
    first = torch.rand(5, generator=generator(7, "views", 3, 12))
    again = torch.rand(5, generator=generator(7, "views", 3, 12))
    assert torch.equal(first, again)


def test_every_part_of_the_key_matters() -> None:
    keys: list[tuple[int | str, ...]] = [
        (0,),
        (1,),
        (0, 0),
        (0, "0"),
        (0, "a", "b"),
        (0, "ab"),
        (0, "ab", ""),
        (0, "b", "a"),
        (-1,),
        (0, 1, 0),
    ]
    seeds = {derive_seed(int(key[0]), *key[1:]) for key in keys}
    assert len(seeds) == len(keys)


def test_the_value_is_pinned() -> None:
    """Changing this breaks the exact resume of every stored run."""
    assert derive_seed(0, "views", 1) == 5978069794869003889
    assert 0 <= derive_seed(-5, "x") < 2**63


def test_stable_across_processes() -> None:
    code = "from kinfolk.seeding import derive_seed; print(derive_seed(3, 'shuffle', 2))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "123"})
    assert int(out.stdout) == derive_seed(3, "shuffle", 2)


@pytest.mark.parametrize("part", [1.5, None, True])
def test_unstable_parts_are_refused(part: object) -> None:
    with pytest.raises(TypeError, match="only int and str"):
        generator(0, part)  # type: ignore[arg-type]
