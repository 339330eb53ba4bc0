"""A generator is a function of seed and key, in every process and version."""

from __future__ import annotations

import pytest
import torch

from kinfolk.seeding import derive_seed, generator, step_generator


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


def test_a_derived_seed_never_changes() -> None:
    """Changing this breaks the exact resume of every stored run. Strings have other hashes in every
    process, and the value is the same."""
    assert derive_seed(0, "views", 1) == 5978069794869003889
    assert 0 <= derive_seed(-5, "x") < 2**63


@pytest.mark.parametrize("part", [1.5, None, True])
def test_unstable_parts_are_refused(part: object) -> None:
    with pytest.raises(TypeError, match="only int and str"):
        generator(0, part)  # type: ignore[arg-type]


def test_every_step_has_its_own_stream_which_is_pinned() -> None:
    """Changing this breaks the exact resume of every stored run with draws from a bank, of keys or
    of partners."""
    first = [
        int(torch.randint(1 << 30, (), generator=step_generator(1 << 61, count)))
        for count in range(3)
    ]
    assert first == [398764591, 1061650667, 794921487]
