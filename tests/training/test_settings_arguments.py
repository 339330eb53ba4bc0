"""Keys read off a signature: checked, converted, completed."""

from __future__ import annotations

import inspect
from typing import Literal

import pytest

from kinfolk.errors import UsageError
from kinfolk.training.settings import check_arguments


class Detector:
    def __init__(
        self,
        num_samples: int,
        alpha: float,
        rule: Literal["adam", "sgd"] = "adam",
        betas: tuple[float, float] = (0.9, 0.98),
    ) -> None: ...


PARAMETERS = {
    name: parameter
    for name, parameter in inspect.signature(Detector).parameters.items()
    if name != "num_samples"
}


def test_texts_become_numbers_and_defaults_are_filled_in() -> None:
    given = {"alpha": "1e-2", "betas": [0.5, 0.6]}
    assert check_arguments(Detector, PARAMETERS, given, "detector", "glofnd") == {
        "alpha": 0.01,
        "rule": "adam",
        "betas": (0.5, 0.6),
    }
    assert check_arguments(Detector, PARAMETERS, given, "detector", "glofnd", written=True) == {
        "alpha": 0.01,
        "rule": "adam",
        "betas": [0.5, 0.6],
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"alpah": 1}, ["`detector.alpah` for glofnd", "did you mean alpha", "betas"]),
        ({"num_samples": 5}, ["`detector.num_samples`"]),
        ({}, ["`detector.alpha` is required"]),
        ({"alpha": "much"}, ["`detector.alpha` (='much')", "number"]),
        ({"alpha": 0.1, "rule": "lbfgs"}, ["`detector.rule` (='lbfgs')", "'adam'"]),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(
    given: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        check_arguments(Detector, PARAMETERS, given, "detector", "glofnd")
    for word in words:
        assert word in str(caught.value)
