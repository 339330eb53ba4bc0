"""Embedding a data set: order, evaluation mode, restored modes, frameworks and bare encoders."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kinfolk.data.views import Views
from kinfolk.embedding import embed
from kinfolk.errors import KinfolkError
from kinfolk.models.heads import evaluating
from tests.data.images import PixelData


class Images(PixelData):
    """Random pixels."""

    def __init__(self, count: int) -> None:
        super().__init__(
            torch.randint(
                0,
                256,
                (count, 8, 8, 3),
                dtype=torch.uint8,
                generator=torch.Generator().manual_seed(0),
            )
        )


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Dropout(0.5))
        self.types: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        out: Tensor = self.body(x).mean((2, 3))
        self.types.add(out.dtype)
        return out


class Framework(nn.Module):
    """Stands for a framework: forward is the loss, features and embeddings have methods of their
    own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(5, 2)

    def forward(self, views: Tensor, ids: Tensor) -> Tensor:
        raise AssertionError("the loss is not wanted here")

    def features(self, images: Tensor) -> Tensor:
        out: Tensor = self.encoder(images)
        return out

    def embed(self, images: Tensor) -> Tensor:
        return nn.functional.normalize(self.head(self.features(images)), dim=1)


VIEWS = Views("simclr", size=8)


def test_equals_one_pass_in_data_order_whatever_the_batch() -> None:
    encoder, data = Encoder(), Images(11)
    with torch.no_grad(), evaluating(encoder):
        expected = encoder(VIEWS.evaluate(data.all))
    for batch_size in (1, 4, 11, 100):
        got = embed(encoder, data, VIEWS, batch_size=batch_size)
        torch.testing.assert_close(got, expected)
    chosen = torch.tensor([7, 0, 7])
    torch.testing.assert_close(embed(encoder, data, VIEWS, chosen), expected[chosen])


def test_statistics_modes_and_random_state_are_left_alone() -> None:
    encoder = Encoder().train()
    encoder.body[1].eval()  # a frozen norm inside a training network
    modes = [part.training for part in encoder.modules()]
    state = {name: value.clone() for name, value in encoder.state_dict().items()}
    random = torch.get_rng_state()
    embed(encoder, Images(6), VIEWS, batch_size=4)
    assert [part.training for part in encoder.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in encoder.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_modes_come_back_after_an_error() -> None:
    encoder = Encoder().train()
    data = Images(6)
    data.all = data.all[:4]  # the last batch can't be read
    with pytest.raises(IndexError):
        embed(encoder, data, VIEWS, torch.arange(6), batch_size=4)
    assert all(part.training for part in encoder.modules())


def test_frameworks_give_features_or_embeddings() -> None:
    framework, data = Framework(), Images(5)
    assert torch.equal(embed(framework, data, VIEWS), embed(framework.encoder, data, VIEWS))
    z = embed(framework, data, VIEWS, projected=True)
    assert z.shape == (5, 2)
    torch.testing.assert_close(z.norm(dim=1), torch.ones(5))


def test_an_encoder_with_a_part_called_features_is_no_framework() -> None:
    class Vgg(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.embed = nn.Conv2d(3, 4, 3), nn.Flatten()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.features(x).mean((2, 3))
            return out

    assert embed(Vgg(), Images(3), VIEWS).shape == (3, 4)


def test_autocast_is_as_asked_and_the_result_is_float32() -> None:
    encoder = Encoder()
    assert embed(encoder, Images(2), VIEWS, autocast=torch.bfloat16).dtype == torch.float32
    assert encoder.types == {torch.bfloat16}
    encoder.types.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):  # that of the caller has no say
        embed(encoder, Images(2), VIEWS)
    assert encoder.types == {torch.float32}


def test_the_bar_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    encoder, data = Encoder(), Images(5)
    assert torch.equal(
        embed(encoder, data, VIEWS, progress=True, batch_size=2),
        embed(encoder, data, VIEWS, batch_size=2),
    )


def test_embedding_without_framework_batch_or_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="`projected` needs a framework; Encoder"):
        embed(Encoder(), Images(2), VIEWS, projected=True)
    with pytest.raises(ValueError, match=r"`batch_size` \(=0\)"):
        embed(Encoder(), Images(2), VIEWS, batch_size=0)
    with pytest.raises(KinfolkError, match="no samples to embed"):
        embed(Encoder(), Images(2), VIEWS, torch.tensor([], dtype=torch.long))
