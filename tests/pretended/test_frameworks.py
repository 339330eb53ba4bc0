"""A refresh and steps of every framework on the pretended device: nothing mixes devices, no step
waits, values are those of the CPU."""

from __future__ import annotations

import copy

import pytest
import torch

from kinfolk.frameworks import FRAMEWORKS
from tests.pretended.device import AVAILABLE, LOG, OnDevice, on_device, pretended
from tests.pretended.methods import METHODS, batch, features, made

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="the pretended device needs g++")


def test_every_framework_is_here() -> None:
    assert {method.partition("+")[0] for method, _, _ in METHODS.values()} == set(FRAMEWORKS)


@pytest.mark.parametrize("name", METHODS)
def test_a_refresh_and_two_steps(name: str) -> None:
    here = made(name)
    with pretended():
        there = copy.deepcopy(here).to("cuda")
        if there.due(0):
            there.refresh(features(there), 0.5)
        state = {key: getattr(value, "held", value) for key, value in there.state_dict().items()}
    here.load_state_dict(state)  # k-means is faiss's on the CPU, whose clusters may differ
    for epoch in range(2):
        given = batch(here, epoch)
        torch.manual_seed(epoch)
        expected = here(**given)
        expected.backward()
        here.after_step()
        with pretended():
            moved = {key: on_device(value) for key, value in given.items()}
            LOG.reset()
            torch.manual_seed(epoch)
            found = there(**moved)
            found.backward()
            there.after_step()
            assert not LOG.waits
        torch.testing.assert_close(found.held, expected, rtol=1e-4, atol=1e-5)
    with pretended():  # what was copied to the host in the last step is taken in
        state = there.state_dict()
    for key, value in state.items():
        if isinstance(value, OnDevice) and "logit_scale" not in key:
            torch.testing.assert_close(
                value.held, here.state_dict()[key], rtol=1e-3, atol=1e-4, msg=key
            )
    with pretended():
        if any(detector.refreshed_at_end for detector in there.detectors):
            there.finish(features(there))
