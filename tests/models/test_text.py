from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kinfolk.errors import UsageError
from kinfolk.models import OpenClipText, TextTransformer, build_encoder, build_text

END = 2


def tower(causal: bool = True, **options: Any) -> TextTransformer:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"width": 16, "layers": 2, "heads": 4, **options}
    return TextTransformer(40, 10, end_id=END, causal=causal, **sizes).eval()


def texts(*lengths: int, context: int = 10) -> Tensor:
    """Rows of start, some tokens, end, padding."""
    random = torch.Generator().manual_seed(1)
    tokens = torch.zeros(len(lengths), context, dtype=torch.int32)
    for row, length in enumerate(lengths):
        tokens[row, 0] = 1
        tokens[row, 1 : length + 1] = torch.randint(3, 40, (length,), generator=random)
        tokens[row, length + 1] = END
    return tokens


def loop_forward(model: Any, tokens: list[int]) -> Tensor:
    """One text, token by token and head by head, up to its end."""
    tokens = tokens[: tokens.index(END) + 1]
    x = [model.tokens.weight[token] + model.positions[place] for place, token in enumerate(tokens)]
    for block in model.blocks:
        size = len(x[0]) // block.heads
        normed = [block.norm1(each) for each in x]
        parts = [block.attend(each).chunk(3) for each in normed]
        for place in range(len(x)):
            heads = []
            for head in range(block.heads):
                part = slice(head * size, (head + 1) * size)
                seen = range(place + 1) if model.causal else range(len(x))
                scores = torch.stack(
                    [parts[place][0][part] @ parts[other][1][part] / size**0.5 for other in seen]
                )
                weights = scores.softmax(0)
                heads.append(
                    sum(
                        (
                            weight * parts[other][2][part]
                            for weight, other in zip(weights, seen, strict=True)
                        ),
                        torch.zeros(size),
                    )
                )
            x[place] = x[place] + block.mix(torch.cat(heads))
        x = [each + block.fall(nn.functional.gelu(block.rise(block.norm2(each)))) for each in x]
    out: Tensor = model.norm(x[-1])
    return out


@pytest.mark.parametrize("causal", [True, False])
def test_equals_a_loop_over_tokens(causal: bool) -> None:
    model, tokens = tower(causal), texts(5, 1, 8)
    expected = torch.stack([loop_forward(model, row.tolist()) for row in tokens])
    torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_what_stands_after_the_end_changes_nothing(causal: bool) -> None:
    model, tokens = tower(causal), texts(5, 3)
    other = tokens.clone()
    other[0, 7:], other[1, 5:] = 9, END
    torch.testing.assert_close(model(other), model(tokens), rtol=1e-5, atol=1e-6)
    alone = torch.cat([model(row[None]) for row in tokens])
    torch.testing.assert_close(model(tokens), alone, rtol=1e-5, atol=1e-6)


def test_causal_differs_and_both_learn() -> None:
    tokens = texts(5, 3)
    assert not torch.allclose(tower(True)(tokens), tower(False)(tokens))
    model = tower()
    model(tokens).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_half_precision_is_close_to_full() -> None:
    model, tokens = tower(width=64).eval(), texts(8, 2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = model(tokens).float()
    full = model(tokens)
    assert (half - full).norm() < 0.03 * full.norm()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"width": 10}, "multiple of `heads`"),
        ({"layers": 0}, "`layers` .=0. must be"),
        ({"heads": 0}, "`heads`"),
    ],
)
def test_wrong_sizes_are_refused_with_name_value_and_rule(
    options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        tower(**options)


def test_a_text_longer_than_the_context() -> None:
    with pytest.raises(ValueError, match="must be at most `context`"):
        tower()(texts(5, context=11))


class FakeClip(nn.Module):
    """What is used of a model of open_clip."""

    context_length = 10

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Linear(2, 3)
        self.token_embedding = nn.Embedding(40, 6)

    def encode_text(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.token_embedding(tokens).mean(1)
        return out


def test_the_adapter_of_open_clip_keeps_its_names_and_drops_the_images() -> None:
    adapted = OpenClipText(FakeClip(), 6)
    assert adapted(texts(3, 4)).shape == (2, adapted.output_size)
    assert list(adapted.state_dict()) == ["model.token_embedding.weight"]


def test_text_encoders_are_built_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"vocab_size": 40, "context": 10, "end_id": END}
    assert isinstance(
        build_text("transformer", **settings, width=16, layers=1, heads=2), TextTransformer
    )
    with pytest.raises(UsageError, match="no text encoder 'transformr'"):
        build_text("transformr", **settings)
    with pytest.raises(UsageError, match="needs CLIP's tokenizer"):
        build_text("open_clip/RN50", **settings)
    with pytest.raises(UsageError, match="use transformer, open_clip/NAME or st/NAME"):
        build_text("huggingface/bert", **settings)
    for name, module, package in (
        ("open_clip/RN50", "open_clip", "open_clip_torch"),
        ("st/bert", "sentence_transformers", "sentence-transformers"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(UsageError, match=f"pip install {package}"):
            build_text(name, vocab_size=49408, context=77, end_id=49407)
    with pytest.raises(UsageError, match="pip install open_clip_torch"):
        build_encoder("open_clip/RN50")
