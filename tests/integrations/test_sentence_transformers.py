"""Losses with detectors in sentence-transformers' trainer, on a small encoder with random
weights."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kinfolk as kf
from kinfolk.errors import KinfolkError

pytest.importorskip("sentence_transformers")
pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the other libraries

WORDS = [f"w{i}" for i in range(40)]
N = 24


def small_model(dropout: float = 0.0) -> Any:
    """A BERT of 2 layers and 16 dimensions, and a tokenizer of whole words."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocab = {
        word: number
        for number, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS))
    }
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names: dict[str, Any] = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=tokenizer, **names)
    size: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    drop: dict[str, Any] = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    torch.manual_seed(0)
    bert = BertModel(BertConfig(vocab_size=len(vocab), max_position_embeddings=32, **size, **drop))
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        bert.save_pretrained(folder)
        fast.save_pretrained(folder)
        body = Transformer(folder, max_seq_length=16)
    return SentenceTransformer(modules=[body, Pooling(16)], device="cpu")


def sentence(*numbers: int) -> str:
    return " ".join(WORDS[number % len(WORDS)] for number in numbers)


def pairs(negatives: int = 0) -> Any:
    """Questions and answers of 4 kinds; the answers of rows 0 and 4 are equal."""
    from datasets import Dataset

    columns = {
        "anchor": [sentence(i % 4, 4 + i, i + 7) for i in range(N)],
        "positive": [
            sentence(i % 4, 20 + max(i, 4), 30 + i % 3) if i != 0 else sentence(0, 24, 31)
            for i in range(N)
        ],
    }
    for k in range(negatives):
        columns[f"negative_{k}"] = [sentence((i + 1 + k) % 4, 11 + i, k) for i in range(N)]
    return Dataset.from_dict(columns)


def features(
    model: Any, dataset: Any, rows: range | list[int]
) -> tuple[list[dict[str, Tensor]], Tensor | None]:
    columns = [name for name in dataset.column_names if name != "label"]
    chosen = dataset.select(list(rows))
    labels = torch.tensor(chosen["label"]) if "label" in dataset.column_names else None
    return [model.preprocess(list(chosen[name])) for name in columns], labels


def arguments(folder: Path, **given: Any) -> Any:
    from sentence_transformers import SentenceTransformerTrainingArguments

    usual = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
    }
    usual |= {"logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "seed": 3}
    return SentenceTransformerTrainingArguments(output_dir=str(folder), **{**usual, **given})


def trainer(model: Any, loss: Any, dataset: Any, args: Any) -> Any:
    from sentence_transformers import SentenceTransformerTrainer

    from kinfolk.integrations.sentence_transformers import KinfolkCallback

    return SentenceTransformerTrainer(
        model=model, args=args, train_dataset=dataset, loss=loss, callbacks=[KinfolkCallback(loss)]
    )


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("negatives", [0, 2])
def test_one_direction_is_multiple_negatives_ranking(negatives: int) -> None:
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    from kinfolk.integrations.sentence_transformers import KinfolkLoss

    model, dataset = small_model(), pairs(negatives)
    plain = kf.CLIPLoss(temperature=0.05, learnable=False)
    ours = KinfolkLoss(model, plain, both_directions=False, known_positives=False)
    found = []
    for loss in (ours, MultipleNegativesRankingLoss(model)):
        model.zero_grad()
        value = loss(features(model, dataset, range(8))[0], None)
        value.backward()
        found.append((value.detach(), gradients(model)))
    torch.testing.assert_close(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-3, atol=1e-6)


def test_chunks_give_the_gradient_of_the_whole_batch() -> None:
    from kinfolk.integrations.sentence_transformers import KinfolkLoss, add_ids, num_ids

    model, dataset = small_model(), add_ids(pairs(1))
    found = []
    for size in (None, 3):
        detector = kf.GloFND(num_samples=num_ids(dataset), alpha=0.2, init="quantile")
        loss = KinfolkLoss(
            model, kf.CLIPLoss(temperature=0.1, detector=detector), mini_batch_size=size
        )
        model.zero_grad()
        value = loss(*features(model, dataset, range(8)))
        assert isinstance(value, Tensor)
        value.backward()  # type: ignore[no-untyped-call]
        found.append(
            (value.detach(), gradients(model), gradients(loss.loss), dict(loss.loss.state_dict()))
        )
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_chunks_repeat_the_dropout_of_the_first_pass() -> None:
    """The gradient is that of the loss returned: a step against it lowers that loss."""
    from kinfolk.integrations.sentence_transformers import KinfolkLoss

    model, dataset = small_model(dropout=0.3), pairs()
    loss = KinfolkLoss(
        model, kf.CLIPLoss(temperature=0.1, learnable=False), mini_batch_size=3
    ).train()
    values = []
    for step in range(2):
        torch.manual_seed(5)
        value = loss(features(model, dataset, range(8))[0], None)
        assert isinstance(value, Tensor)
        values.append(float(value.detach()))
        if step == 0:
            value.backward()  # type: ignore[no-untyped-call]
            norm = float(gradients(model).square().sum())
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p -= 1e-4 * p.grad
    assert values[0] - values[1] == pytest.approx(1e-4 * norm, rel=0.05)


def test_equal_positives_are_not_negatives_without_ids() -> None:
    from kinfolk.integrations.sentence_transformers import KinfolkLoss

    model, dataset = small_model(), pairs()
    assert dataset["positive"][0] == dataset["positive"][4]
    loss = KinfolkLoss(model, kf.CLIPLoss(temperature=0.1))
    loss(features(model, dataset, range(8))[0], None)
    assert int(loss.loss.stats.negatives) == 2 * (8 * 7 - 2)
    detector = kf.GloFND(num_samples=N, alpha=0.1)
    stateful = KinfolkLoss(model, kf.CLIPLoss(temperature=0.1, detector=detector))
    with pytest.raises(ValueError, match=r"train on the data set that add_ids\(dataset\) returns"):
        stateful(features(model, dataset, range(8))[0], None)
    with pytest.raises(ValueError, match=r"must be the column that add_ids"):
        loss(features(model, dataset, range(8))[0], torch.arange(8))


def test_ids_and_groups_of_a_data_set() -> None:
    from datasets import Dataset

    from kinfolk.integrations.sentence_transformers import add_ids, num_ids

    given = {
        "question": ["a", "b", "a", "c", "d"],
        "answer": ["1", "2", "3", "2", "5"],
        "negative": ["2", "x", "y", "x", "1"],
        "page": ["", "p", "q", "q", None],
    }
    dataset = Dataset.from_dict(given)
    plain = add_ids(dataset.remove_columns("page"))
    # rows 0 and 2 share a question, rows 1 and 3 an answer; "2" is the answer of row 3, "1" of row
    # 0
    assert plain["label"][:] == [
        [0, 0, 3, 1],
        [1, 1, 5, -1],
        [2, 0, 6, -1],
        [3, 1, 5, -1],
        [4, 4, 0, 0],
    ]
    assert num_ids(plain) == 7
    linked = add_ids(dataset, known_by="page")
    assert [row[1] for row in linked["label"]] == [0, 0, 0, 0, 4]
    assert linked.column_names == ["question", "answer", "negative", "label"]
    named = add_ids(
        Dataset.from_dict({"id": ["k", "l", "k"], "q": ["a", "b", "c"], "p": ["d", "e", "f"]}),
        ids="id",
    )
    labels = named["label"][:]
    assert labels[0] == labels[2] != labels[1]
    assert {row[0] for row in labels} == {0, 1}
    with pytest.raises(ValueError, match="there is no column 'url'"):
        add_ids(dataset, known_by="url")


def test_an_explicit_negative_that_is_an_anchor_is_no_negative_of_its_row() -> None:
    from datasets import Dataset

    from kinfolk.integrations.sentence_transformers import add_ids

    given = {"q": ["a", "b", "c"], "p": ["1", "2", "3"], "n": ["b", "3", "a"]}
    labels = add_ids(Dataset.from_dict(given))["label"][:]
    assert labels == [[0, 0, 3, 1], [1, 1, 2, 2], [2, 2, 4, 0]]


def test_explicit_negatives_alone() -> None:
    from kinfolk.integrations.sentence_transformers import KinfolkLoss

    model, objective = small_model().eval(), kf.CLIPLoss(temperature=0.1, learnable=False)
    columns = features(model, pairs(1), range(6))[0]
    loss = KinfolkLoss(model, objective, own_negatives_only=True, in_batch_negatives=False)
    q, d, n = (model(dict(column))["sentence_embedding"] for column in columns)
    scores = torch.stack([F.cosine_similarity(q, each) for each in (d, n)], 1) / 0.1
    expected = F.cross_entropy(scores, torch.zeros(6, dtype=torch.int64))
    torch.testing.assert_close(loss(columns), expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"q": [], "p": []}, "at least one row"),
        ({"q": ["a", "b"], "p": ["c", None]}, "row 1 of the column 'p' is None, not a text"),
        ({"q": ["a", "b"], "p": ["c", " "]}, "row 1 of the column 'p' is ' ', not a text"),
        ({"q": ["a"], "p": ["c"], "views": [3]}, "row 0 of the column 'views' is 3, not a text"),
    ],
)
def test_data_sets_that_are_not_texts_are_refused(given: dict[str, Any], message: str) -> None:
    from datasets import Dataset

    from kinfolk.integrations.sentence_transformers import add_ids

    with pytest.raises(ValueError, match=message):
        add_ids(Dataset.from_dict(given))
    with pytest.raises(ValueError, match="which an IterableDataset or a dict is not"):
        add_ids(Dataset.from_dict({"q": ["a"], "p": ["b"]}).to_iterable_dataset())


def thresholds(number: int) -> kf.Detector:
    return kf.GloFND(num_samples=number, alpha=0.1, init="quantile")


def clusters(number: int) -> kf.Detector:
    return kf.IFND(num_samples=number, num_clusters=(3, 5), schedule="constant")


def both(number: int) -> kf.Detector:
    return kf.Union(thresholds(number), clusters(number))


@pytest.mark.parametrize("make", [thresholds, clusters, both])
def test_resuming_equals_an_undisturbed_training(
    tmp_path: Path, make: Callable[[int], kf.Detector]
) -> None:
    """Weights, temperature, thresholds and clusters, from a checkpoint in the middle of an
    epoch."""
    from kinfolk.integrations.sentence_transformers import KinfolkLoss, add_ids, num_ids

    dataset = add_ids(pairs(1))
    number = num_ids(dataset)

    def fresh() -> tuple[Any, KinfolkLoss]:
        torch.manual_seed(1)
        model = small_model(dropout=0.1)
        return model, KinfolkLoss(model, kf.CLIPLoss(temperature=0.1, detector=make(number)))

    model, loss = fresh()
    given = {"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 4}
    whole = trainer(model, loss, dataset, arguments(tmp_path / "one", **given))
    whole.train()
    again, other = fresh()
    resumed = trainer(again, other, dataset, arguments(tmp_path / "one", **given))
    resumed.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-4"))
    for name, value in loss.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    assert any("flagged" in entry and 0 < entry["flagged"] < 1 for entry in whole.state.log_history)
    assert any("temperature" in entry for entry in whole.state.log_history)
    assert whole.state.log_history[-2]["loss"] == resumed.state.log_history[-2]["loss"]
    elsewhere, third = fresh()
    moved = tmp_path / "moved"
    shutil.copytree(tmp_path / "one" / "checkpoint-4", moved)
    with pytest.raises(KinfolkError, match="checkpoint in the output folder"):
        trainer(elsewhere, third, dataset, arguments(tmp_path / "two", **given)).train(
            resume_from_checkpoint=str(moved)
        )


@pytest.mark.parametrize(
    "make",
    [
        lambda n: kf.SigLIPLoss(detector=kf.PositiveMargin()),
        lambda n: kf.BimodalSogCLRLoss(
            num_samples=n, detector=kf.StartAt(kf.FNC(top_k=1), epoch=1)
        ),
        lambda n: kf.FastCLIPLoss(
            num_samples=n, detector=kf.GloFND(num_samples=n, alpha=0.1), action="reweight"
        ),
    ],
)
def test_every_loss_trains(make: Any, tmp_path: Path) -> None:
    from kinfolk.integrations.sentence_transformers import KinfolkLoss, add_ids, num_ids

    dataset, model = add_ids(pairs()), small_model()
    loss = KinfolkLoss(model, make(num_ids(dataset)), mini_batch_size=4)
    before = copy.deepcopy(model.state_dict())
    started = trainer(model, loss, dataset, arguments(tmp_path))
    started.train()
    assert all(value.isfinite().all() for value in model.state_dict().values())
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert any("flagged" in entry for entry in started.state.log_history)
    value = loss(*features(model, dataset, range(8)))
    assert isinstance(value, Tensor)  # outside of a trainer it is a scalar


def test_a_loss_without_a_detector_trains(tmp_path: Path) -> None:
    """With nothing to log: the trainer fails on a loss with an empty dictionary of parts."""
    from kinfolk.integrations.sentence_transformers import KinfolkLoss, add_ids

    model = small_model()
    loss = KinfolkLoss(model, kf.CLIPLoss(temperature=0.1, learnable=False))
    started = trainer(model, loss, add_ids(pairs()), arguments(tmp_path))
    started.train()
    assert any("loss" in entry for entry in started.state.log_history)


def test_a_loss_with_state_asks_for_its_callback() -> None:
    from kinfolk.integrations.sentence_transformers import KinfolkLoss

    model = small_model().train()
    loss = KinfolkLoss(model, kf.CLIPLoss(temperature=0.1, detector=kf.FNC(top_k=1)))
    with pytest.warns(UserWarning, match="KinfolkCallback"):
        loss(features(model, pairs(), range(4))[0], None)
    with pytest.raises(ValueError, match="must be a loss of two towers"):
        KinfolkLoss(model, kf.NTXentLoss(temperature=0.1))  # type: ignore[arg-type]


def gradient_of(model: Any, rows: list[int], ranks: bool) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of the encoder, in chunks, with explicit negatives and a
    detector."""
    from torch.nn.parallel import DistributedDataParallel

    from kinfolk.integrations.sentence_transformers import KinfolkLoss, add_ids, num_ids

    warnings.simplefilter("ignore")
    dataset = add_ids(pairs(1))
    detector = kf.GloFND(num_samples=num_ids(dataset), alpha=0.2, init="quantile")
    loss = KinfolkLoss(model, kf.CLIPLoss(temperature=0.1, detector=detector), mini_batch_size=2)
    given = features(model, dataset, rows)
    if ranks:
        loss.model = DistributedDataParallel(model, find_unused_parameters=True)
    value = loss(*given)
    assert isinstance(value, Tensor)
    value.backward()  # type: ignore[no-untyped-call]
    return value.detach(), gradients(model)
