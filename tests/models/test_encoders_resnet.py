"""ResNet: torchvision's names and shapes (by rule, and against the package where it is installed),
stems, width, channels-last."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch

from kinfolk.models.encoders import ResNet, resnet10, resnet18, resnet34, resnet50
from kinfolk.models.weights import load_state

Shapes = dict[str, tuple[int, ...]]


def torchvision_shapes(bottleneck: bool, depths: tuple[int, int, int, int]) -> Shapes:
    """Names and shapes of torchvision's ResNet state dict, written down from its published
    files."""
    shapes: Shapes = {"conv1.weight": (64, 3, 7, 7)}

    def norm(name: str, size: int) -> None:
        for part in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{name}.{part}"] = (size,)
        shapes[f"{name}.num_batches_tracked"] = ()

    norm("bn1", 64)
    before = 64
    for stage, depth in enumerate(depths, start=1):
        mid = {1: 64, 2: 128, 3: 256, 4: 512}[stage]
        after = mid * 4 if bottleneck else mid
        for index in range(depth):
            at = f"layer{stage}.{index}"
            if bottleneck:
                shapes[f"{at}.conv1.weight"] = (mid, before, 1, 1)
                shapes[f"{at}.conv2.weight"] = (mid, mid, 3, 3)
                shapes[f"{at}.conv3.weight"] = (after, mid, 1, 1)
                norm(f"{at}.bn3", after)
            else:
                shapes[f"{at}.conv1.weight"] = (mid, before, 3, 3)
                shapes[f"{at}.conv2.weight"] = (mid, mid, 3, 3)
            norm(f"{at}.bn1", mid)
            norm(f"{at}.bn2", mid)
            if index == 0 and (stage > 1 or bottleneck):
                shapes[f"{at}.downsample.0.weight"] = (after, before, 1, 1)
                norm(f"{at}.downsample.1", after)
            before = after
    shapes["fc.weight"], shapes["fc.bias"] = (1000, before), (1000,)
    return shapes


CASES = [
    (resnet18, torchvision_shapes(False, (2, 2, 2, 2)), 11_689_512),
    (resnet34, torchvision_shapes(False, (3, 4, 6, 3)), 21_797_672),
    (resnet50, torchvision_shapes(True, (3, 4, 6, 3)), 25_557_032),
]


@pytest.mark.parametrize(("make", "shapes", "published"), CASES)
def test_names_and_shapes_are_torchvisions(
    make: Callable[..., ResNet], shapes: Shapes, published: int
) -> None:
    learned = [
        shape
        for name, shape in shapes.items()
        if not name.endswith(("running_mean", "running_var", "num_batches_tracked"))
    ]
    # the rule itself is right
    assert sum(torch.Size(shape).numel() for shape in learned) == published
    encoder = make(stem="imagenet")
    own = {name: tuple(value.shape) for name, value in encoder.state_dict().items()}
    assert own == {name: shape for name, shape in shapes.items() if not name.startswith("fc.")}
    load_state(encoder, {name: torch.full(shape, 0.5) for name, shape in shapes.items()})
    assert bool((encoder.state_dict()["layer4.1.conv2.weight"] == 0.5).all())


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed"
)
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_equals_torchvision(name: str) -> None:
    from torchvision import models

    from kinfolk.models.encoders import build_encoder

    theirs = models.get_model(name).eval()
    ours = build_encoder(name, stem="imagenet").eval()
    load_state(ours, theirs.state_dict())
    theirs.fc = torch.nn.Identity()
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours(x), theirs(x))
    fresh = build_encoder(name, stem="imagenet").eval()
    theirs.load_state_dict(fresh.state_dict())
    torch.testing.assert_close(fresh(x), theirs(x))


def test_output_sizes_and_stems() -> None:
    x = torch.randn(2, 3, 32, 32)
    for make, size in ((resnet10, 128), (resnet18, 512), (resnet50, 2048)):
        encoder = make().eval()
        assert encoder.output_size == size
        assert encoder(x).shape == (2, size)
    small, large = resnet10(stem="cifar"), resnet10(stem="imagenet")
    assert small.maxpool(small.conv1(x)).shape[2:] == (32, 32)
    assert large.maxpool(large.conv1(x)).shape[2:] == (8, 8)


def test_resnet10_is_small_and_its_width_counts() -> None:
    assert 290_000 < sum(parameter.numel() for parameter in resnet10().parameters()) < 320_000
    assert resnet10(width=8).output_size == 64
    assert resnet10(width=8).conv1.out_channels == 8


def test_channels_last_gives_the_same() -> None:
    encoder = resnet10(width=8).eval()
    x = torch.randn(3, 3, 32, 32)
    expected = encoder(x)
    last = encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    got = last(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_gradient_reaches_every_parameter() -> None:
    encoder = resnet10(width=4)
    encoder(torch.randn(4, 3, 16, 16)).square().sum().backward()
    assert all(
        parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        for parameter in encoder.parameters()
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"stem": "tiny"}, "`stem` \\(='tiny'\\)"), ({"width": 0}, "`width` \\(=0\\)")],
)
def test_wrong_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resnet18(**settings)  # type: ignore[arg-type]
