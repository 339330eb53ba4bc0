from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from kinfolk.errors import KinfolkError
from kinfolk.models import (
    OpenClipText,
    TextTransformer,
    adapt,
    build_encoder,
    projection_head,
    save_encoder,
)
from kinfolk.models.weights import PARTS, TOWERS, Pair, load_parts, save_towers


def pair(seed: int) -> Pair:
    torch.manual_seed(seed)
    text = TextTransformer(20, 6, end_id=2, width=8, layers=1, heads=2)
    return Pair(
        build_encoder("resnet10", width=8),
        projection_head(64, 8, 6, layers=1),
        text,
        nn.Linear(8, 6, bias=False),
    ).eval()


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(value, b.state_dict()[name]) for name, value in a.state_dict().items())


TOKENS = torch.tensor([[1, 5, 2, 0, 0, 0], [1, 6, 7, 8, 2, 0]])


def test_both_towers_meet_on_the_sphere() -> None:
    model = pair(0)
    images, texts = model.embed(torch.randn(3, 3, 8, 8)), model.embed_text(TOKENS)
    assert (images.shape, texts.shape) == ((3, 6), (2, 6))
    torch.testing.assert_close(torch.cat((images, texts)).norm(dim=1), torch.ones(5))


@pytest.mark.parametrize("kind", ["towers", "state", "checkpoint"])
def test_saved_towers_are_begun_from(kind: str, tmp_path: Path) -> None:
    one, other = pair(0), pair(1)
    assert not same(one, other)
    path = save_towers(one, tmp_path)
    assert path.name == TOWERS
    if kind == "state":
        path = tmp_path / "state.pt"
        torch.save(one.state_dict(), path)
    if kind == "checkpoint":
        path = tmp_path / "last.ckpt"
        names = {f"framework.{name}": value for name, value in one.state_dict().items()}
        torch.save({"state_dict": names | {"framework.objective.scale": torch.zeros(())}}, path)
    assert load_parts(other, path) == list(PARTS)
    assert same(one, other)


def test_a_saved_encoder_alone_is_begun_from(tmp_path: Path) -> None:
    one, other = pair(0), pair(1)
    path = save_encoder(one.encoder, tmp_path)
    assert load_parts(other, path) == ["encoder"]
    assert same(one.encoder, other.encoder)
    assert not same(one.text_encoder, other.text_encoder)


def test_towers_into_a_model_without_text(tmp_path: Path) -> None:
    one = pair(0)
    model = nn.Module()
    model.encoder, model.head = pair(1).encoder, pair(1).head
    assert load_parts(model, save_towers(one, tmp_path)) == ["encoder", "head"]
    assert same(one.encoder, model.encoder)


class FakeClip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.token_embedding = nn.Embedding(20, 4)
        self.logit_scale = nn.Parameter(torch.ones(()))

    def encode_text(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.token_embedding(tokens).mean(1)
        return out


def test_a_whole_model_of_open_clip(tmp_path: Path) -> None:
    whole, fresh = FakeClip(), FakeClip()
    torch.save(whole.state_dict(), tmp_path / "clip.pt")
    fresh_visual = fresh.visual
    encoder = adapt(fresh_visual, 4)
    model = Pair(encoder, nn.Identity(), OpenClipText(fresh, 4), nn.Identity())
    assert load_parts(model, tmp_path / "clip.pt") == ["encoder", "text_encoder"]
    assert torch.equal(fresh.token_embedding.weight, whole.token_embedding.weight)
    assert same(fresh_visual, whole.visual)


def test_weights_that_don_t_fit_or_run_code(tmp_path: Path) -> None:
    path = save_towers(pair(0), tmp_path)
    other = Pair(build_encoder("resnet10", width=16), nn.Identity(), nn.Identity(), nn.Identity())
    with pytest.raises(KinfolkError, match="don't fit"):
        load_parts(other, path)
    torch.save({"a": print}, tmp_path / "code.pt")
    with pytest.raises(KinfolkError, match="can't be read as weights"):
        load_parts(pair(0), tmp_path / "code.pt")
