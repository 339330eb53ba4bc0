"""One flipped bit, anywhere: checkpoints and models are refused, a cache is written anew
or refused."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kinfolk.data.pixel_cache import FileStore, Verify, map_pixels
from kinfolk.errors import KinfolkError
from kinfolk.files import (
    DamagedFileError,
    check_safetensors,
    check_sealed_zip,
    write_safetensors,
    write_sealed_zip,
)
from kinfolk.models.weights import read_state
from tests.faults.campaign import Tally, flips
from tests.faults.inject import flipped


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_the_bits_of_a_small_model_count(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"w": torch.arange(6.0)}, {"kinfolk": '{"format": 1}'})
    whole = path.read_bytes()
    assert torch.equal(read_state(path)["w"], torch.arange(6.0))
    for bit in range(0, len(whole) * 8, 3):
        path.write_bytes(flipped(whole, bit))
        with pytest.raises(KinfolkError):
            read_state(path)


def test_the_bits_of_a_small_checkpoint_count(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write_sealed_zip(path, lambda file: torch.save({"w": torch.zeros(3)}, file))
    assert torch.equal(torch.load(path, weights_only=True)["w"], torch.zeros(3)), (
        "still what torch reads"
    )
    check_sealed_zip(path)
    whole = path.read_bytes()
    for bit in range(0, len(whole) * 8, 29):
        path.write_bytes(flipped(whole, bit))
        with pytest.raises(DamagedFileError):
            check_sealed_zip(path)


def test_files_of_other_programs_have_no_digest(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(2)}, tmp_path / "a.safetensors", {"format": "pt"})
    assert torch.equal(read_state(tmp_path / "a.safetensors")["w"], torch.zeros(2))
    with pytest.raises(DamagedFileError, match="has no digest"):
        check_safetensors(tmp_path / "a.safetensors", {"format": "pt"}, required=True)


def test_a_large_cache_is_verified_where_it_is_read(tmp_path: Path) -> None:
    store = FileStore(tmp_path, (100, 32, 32, 3))
    for row in range(100):
        store.add(np.full((32, 32, 3), row, dtype=np.uint8))
    store.close_as(tmp_path / "pixels")
    data = (tmp_path / "pixels").read_bytes()
    (tmp_path / "pixels").write_bytes(flipped(data, 50 * 3072 * 8 + 5))
    cache = map_pixels(tmp_path / "pixels", (100, 32, 32, 3))
    verify = Verify(tmp_path / "pixels", cache, np.array(store.checksums))
    verify(torch.tensor([0, 1, 99]))
    with pytest.raises(
        KinfolkError,
        match=r"the pixel cache .*pixels is damaged at image 50; remove the folder",
    ):
        verify(torch.tensor([3, 50]))


def test_flips_and_other_damage_are_held(tmp_path: Path) -> None:
    tally = Tally()
    flips(6, random.Random(0), tmp_path, tally)
    assert tally.all_held
    assert sum(tally.tried.values()) >= 49, "six bits and one other damage of seven files"
