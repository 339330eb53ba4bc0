"""The registry: a file is enough for a new detector; signatures are keyword-only and shown in
full."""

from __future__ import annotations

import inspect
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

import kinfolk as kf
from kinfolk import detectors, objectives
from kinfolk.detectors import DETECTORS, Detector, register
from kinfolk.frameworks.registry import Context, build_detector, detector_arguments, parse
from kinfolk.objectives.fastclip import RobustContrastLoss
from kinfolk.pairs import Action

MAIN = {"oracle": "labels", "guide": "features", "known": "pairs"}
"""The one argument of these detectors that may be given by position: what they are built around."""
LOSSES = [
    kind
    for kind in (*map(objectives.__dict__.get, objectives.__all__), RobustContrastLoss)
    if isinstance(kind, type) and not str(kind.__doc__).startswith("Abstract.")
]
SHARED = {"temperature", "detector", "action", "min_negatives", "kin_weight", "own_weight"}
SHARED |= {"block_rows", "gather", "compile"}


def test_arguments_of_a_detector_are_keyword_only_but_what_it_is_built_around() -> None:
    for name, detector in DETECTORS.items():
        parameters = inspect.signature(detector).parameters.values()
        by_position = [p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        assert by_position == ([MAIN[name]] if name in MAIN else []), name
        shares = {"fraction", "share"} & {p.name for p in parameters}
        assert not shares, f"{name}: a share to flag is `alpha`"


def test_arguments_of_a_wrapper_are_keyword_only_but_the_detector() -> None:
    for wrapper in (kf.StartAt, kf.StopAt):
        parameters = inspect.signature(wrapper).parameters.values()
        by_position = [p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        assert by_position == ["detector"], wrapper


def test_a_detector_without_arguments_shows_none() -> None:
    class Nothing(kf.Detector):
        def find(self, block: kf.Block) -> kf.Kin:
            return kf.Kin()

    assert not inspect.signature(Nothing).parameters
    assert not inspect.signature(kf.Components).parameters


def test_a_loss_shows_all_its_arguments_and_all_are_keyword_only() -> None:
    for kind in LOSSES:
        parameters = inspect.signature(kind).parameters
        assert set(parameters) >= SHARED, kind
        assert {p.kind for p in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}, kind
        assert parameters["detector"].default is None, kind
        assert parameters["action"].default in ("eliminate", "attract"), kind
        required = [name for name, p in parameters.items() if p.default is p.empty]
        assert required in ([], ["num_samples"]), kind


def test_every_loss_is_public() -> None:
    assert {kind.__name__ for kind in LOSSES} - {"RobustContrastLoss"} <= set(kf.__all__)
    assert all(kind.__name__.endswith("Loss") for kind in LOSSES)
    assert len(LOSSES) == 9


def test_a_registered_detector_is_public_and_names_its_paper() -> None:
    for name, kind in DETECTORS.items():
        assert getattr(kf, kind.__name__) is kind, name
        assert kind.paper, name
        assert kind.needs, name
        assert parse(f"simclr+{name}").action == kind.default_action, name
        for variant, arguments in kind.variants.items():
            method = parse(f"simclr+{name}:{variant}")
            assert method.named_arguments == arguments, method
            assert arguments.keys() <= detector_arguments(method).keys(), method


def test_an_argument_by_position_is_refused() -> None:
    wrong: list[Any] = [
        lambda: kf.NTXentLoss(0.1),  # type: ignore[call-arg]
        lambda: kf.NTXentLoss(0.1, kf.FNC(top_k=3)),  # type: ignore[call-arg]
        lambda: kf.SogCLRLoss(100),  # type: ignore[call-arg]
        lambda: kf.FNC(0.1),  # type: ignore[call-arg]
        lambda: kf.GloFND(100, 0.1),  # type: ignore[call-arg]
        lambda: kf.Ring(0.5, 0.9),  # type: ignore[call-arg]
        lambda: kf.Known(torch.zeros(0, 2, dtype=torch.int64), 6),  # type: ignore[call-arg]
        lambda: kf.StartAt(kf.FNC(top_k=1), 3),  # type: ignore[call-arg]
    ]
    for call in wrong:
        with pytest.raises(TypeError, match="positional argument"):
            call()


OF_DETECTOR: dict[str, dict[str, Any]] = {
    "cave": {"num_clusters": 3},
    "ring": {"lower": 0.2, "upper": 0.9, "num_clusters": 3},
    "known": {"pairs": torch.tensor([[0, 2]])},
    "guide": {"features": torch.eye(8), "alpha": 0.2},
    "neighbours": {"num_clusters": 3},
}


@pytest.mark.parametrize(
    "name", sorted(DETECTORS.keys() - {"fnc", "components", "teacher", "positive_margin"})
)
def test_ids_outside_of_the_data_are_named_by_the_loss(name: str) -> None:
    made = build_detector(
        parse(f"simclr+{name}"), Context(8, torch.arange(8) % 3), OF_DETECTOR.get(name, {})
    )
    assert made is not None
    if made.num_samples is None:
        pytest.skip("a new detector that looks nothing up")
    assert made.num_samples == 8
    action: Action = "attract" if made.soft else "eliminate"
    for detector in (made, kf.StartAt(made, epoch=5)):
        for bad in (-1, 8):
            ids = torch.tensor([0, 3, bad, 4])
            with pytest.raises(ValueError, match=rf"^`ids` \(={bad}\) must be in \[0, 8\)"):
                kf.NTXentLoss(detector=detector, action=action)(torch.eye(4), torch.eye(4), ids)
            anchors = torch.eye(4).unsqueeze(1)
            pairs = kf.Pairs(torch.eye(4), torch.eye(4), anchors, torch.arange(4), ids)
            with pytest.raises(ValueError, match=rf"^`ids` \(={bad}\) must be in \[0, 8\)"):
                kf.NTXentLoss(detector=detector, action=action).on(pairs)


def test_the_decorator_registers_name_paper_and_defaults() -> None:
    try:

        @register("mine", "me, 2026", "nothing", action="attract", variants={"two": {"number": 2}})
        class Mine(Detector):
            def __init__(self, *, number: int = 1) -> None:
                super().__init__()
                self.number = number

            def find(self, block: kf.Block) -> kf.Kin:
                return kf.Kin()

        assert DETECTORS["mine"] is Mine
        assert (Mine.paper, Mine.needs, Mine.default_action) == ("me, 2026", "nothing", "attract")
        assert str(parse("simclr+mine")) == "simclr+mine:attract"
        built = build_detector(parse("simclr+mine:two:reweight"), Context(8), {})
        assert isinstance(built, Mine)
        assert built.number == 2
        assert Detector.paper == Detector.needs == ""
    finally:
        DETECTORS.pop("mine", None)


FILE = """
from kinfolk.detectors.base import Detector, register
from kinfolk.pairs import Kin, above


@register("mine", "me, 2026", "nothing", action="attract")
class Mine(Detector):
    def __init__(self, *, level=0.5):
        super().__init__()
        self.level = level

    def find(self, block):
        return Kin(above(block, block.sim_RC.new_full((len(block.sim_RC),), self.level)))
"""


def test_a_new_file_in_the_package_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The package is imported again, with one more folder of modules."""
    from kinfolk.cli.lists import methods

    (tmp_path / "mine.py").write_text(FILE)
    init = Path(inspect.getfile(detectors))
    folders = [str(init.parent), str(tmp_path)]
    spec = spec_from_file_location(detectors.__name__, init, submodule_search_locations=folders)
    assert spec is not None
    assert spec.loader is not None
    again = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, detectors.__name__, again)
    try:
        spec.loader.exec_module(again)
        assert again.DETECTORS is DETECTORS
        assert "mine" in DETECTORS
        methods()
        assert "me, 2026" in capsys.readouterr().out
        assert str(parse("simclr+mine")) == "simclr+mine:attract"
        mine = build_detector(parse("simclr+mine"), Context(8), {"level": 0.25})
        z = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
        found, same = (kf.NTXentLoss(detector=each) for each in (mine, kf.FNC(min_similarity=0.25)))
        assert torch.equal(found(z[0], z[1]), same(z[0], z[1]))
        assert int(found.stats.flagged) > 0
    finally:
        DETECTORS.pop("mine", None)
        sys.modules.pop(f"{detectors.__name__}.mine", None)
