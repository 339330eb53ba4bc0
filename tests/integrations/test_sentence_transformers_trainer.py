"""`KinfolkLoss` in a trainer: evaluation, accumulated gradients, processes, several losses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import kinfolk as kf
from kinfolk.errors import KinfolkError
from tests.ranks import end_rank, spawn

pytest.importorskip("sentence_transformers")
pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the other libraries

from tests.integrations.test_sentence_transformers import (  # noqa: E402
    N,
    arguments,
    features,
    gradient_of,
    pairs,
    small_model,
)


def made(detector: str = "glofnd", **given: Any) -> tuple[Any, Any, Any]:
    """A data set with ids, a model, and a loss with a detector that has state."""
    from kinfolk.integrations.sentence_transformers import KinfolkLoss, add_ids, num_ids

    dataset = add_ids(pairs(1))
    number = num_ids(dataset)
    found: kf.Detector = kf.GloFND(num_samples=number, alpha=0.2, init="quantile")
    if detector == "ifnd":
        found = kf.IFND(num_samples=number, num_clusters=(3, 5), schedule="constant")
    torch.manual_seed(1)
    model = small_model()
    return dataset, model, KinfolkLoss(model, kf.CLIPLoss(temperature=0.1, detector=found), **given)


def trainer(model: Any, loss: Any, dataset: Any, args: Any, **given: Any) -> Any:
    from sentence_transformers import SentenceTransformerTrainer

    from kinfolk.integrations.sentence_transformers import KinfolkCallback

    losses = loss.values() if isinstance(loss, dict) else [loss]
    callbacks: list[Any] = [KinfolkCallback(each) for each in losses]
    return SentenceTransformerTrainer(
        model=model, args=args, train_dataset=dataset, loss=loss, callbacks=callbacks, **given
    )


def weights(model: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_evaluation_is_without_a_detector_and_changes_nothing(tmp_path: Path) -> None:
    """Questions without ids, of which the training knows nothing."""
    from kinfolk.integrations.sentence_transformers import KinfolkLoss

    args = arguments(tmp_path, num_train_epochs=1, eval_strategy="steps", eval_steps=1)
    dataset, model, loss = made()
    other = pairs(1).select(range(5, 13))
    evaluated = trainer(model, loss, dataset, args, eval_dataset=other)
    evaluated.train()
    entries = [entry for entry in evaluated.state.log_history if "eval_loss" in entry]
    assert len(entries) == 3
    assert not any("eval_flagged" in entry for entry in entries)
    again, plain = made()[1:]
    trainer(again, plain, dataset, arguments(tmp_path, num_train_epochs=1)).train()
    assert torch.equal(weights(model), weights(again))
    for name, value in loss.loss.state_dict().items():
        assert torch.equal(plain.loss.state_dict()[name], value), name
    model.eval()
    bare = KinfolkLoss(model, kf.CLIPLoss(temperature=loss.loss.current_temperature))
    expected = bare(features(model, other, range(8))[0], None)
    assert entries[-1]["eval_loss"] == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize(
    ("make", "same"),
    [
        (lambda: kf.BimodalSogCLRLoss(num_samples=N, temperature=2.0), None),
        (lambda: kf.FastCLIPLoss(num_samples=N), None),
        (lambda: kf.SigLIPLoss(bias=-3.0, detector=kf.FNC(top_k=2)), kf.SigLIPLoss(bias=-3.0)),
    ],
)
def test_every_loss_evaluates_other_samples(make: Any, same: Any) -> None:
    from kinfolk.integrations.sentence_transformers import KinfolkLoss

    model, dataset = small_model().eval(), pairs(1)
    given = features(model, dataset, range(8))
    found = KinfolkLoss(model, make())(*given)
    if same is None:
        same = kf.CLIPLoss(learnable=False)
        for each in same.objectives:
            each.temperature = make().current_temperature
    model.train()  # no dropout
    torch.testing.assert_close(found, KinfolkLoss(model, same)(*given))


def test_gradients_are_accumulated(tmp_path: Path) -> None:
    """A step goes along the mean of the gradients of its batches."""
    dataset, model, loss = made()
    given = {"optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant", "max_steps": 1}
    args = arguments(tmp_path, gradient_accumulation_steps=2, **given)
    batches, before = list[Any](), weights(model).clone()
    loss.register_forward_pre_hook(lambda _, batch: batches.append(batch))
    started = trainer(model, loss, dataset, args)
    started.train()
    fresh, other = made()[1:]
    values = [other(*batch) for batch in batches]
    torch.stack(values).mean().backward()  # type: ignore[no-untyped-call]
    assert len(values) == 2
    grads = [p.new_zeros(p.shape) if p.grad is None else p.grad for p in fresh.parameters()]
    expected = before - 1e-2 * torch.cat([grad.flatten() for grad in grads])
    torch.testing.assert_close(weights(model), expected, rtol=1e-4, atol=1e-7)
    mean = float(torch.stack(values).mean().detach())
    assert started.state.log_history[0]["loss"] == pytest.approx(mean, rel=1e-5)


def test_it_trains_within_another_loss(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformerTrainer, losses

    from kinfolk.integrations.sentence_transformers import KinfolkCallback

    dataset, model, loss = made()
    size = len(model.encode("a"))
    started = SentenceTransformerTrainer(
        model=model,
        args=arguments(tmp_path, max_steps=2),
        train_dataset=dataset,
        loss=losses.MatryoshkaLoss(model, loss, [size, size // 2]),
        callbacks=[KinfolkCallback(loss)],
    )
    before = weights(model).clone()
    started.train()
    assert started.state.log_history[0]["loss"] > 0
    assert not torch.equal(weights(model), before)


def trained(folder: str, detector: str, size: int, parts: tuple[Any, Any, Any]) -> dict[str, Any]:
    """Weights, state and logs of a training that evaluates between its steps."""
    dataset, model, loss = parts
    given = {"num_train_epochs": 1, "eval_strategy": "steps", "eval_steps": 2}
    args = arguments(Path(folder), **given, per_device_train_batch_size=size)
    other = pairs(1).select(range(5, 13))
    started = trainer(model, loss, dataset, args, eval_dataset=other)
    started.train()
    names = ("loss", "flagged", "temperature")
    logs = [
        [entry[name] for name in names] for entry in started.state.log_history if "loss" in entry
    ]
    return {"weights": weights(model), **loss.loss.state_dict(), "logs": torch.tensor(logs)}


SIZES, WITH_STATE = (5, 3), ("glofnd", "ifnd")


def rank_of(rank: int, folder: str) -> None:
    """One batch of unequal parts, and trainings; importing the libraries is what takes time."""
    torch.set_num_threads(1)
    model = small_model()  # before there are ranks: only the first of them writes files
    parts = {detector: made(detector, mini_batch_size=3) for detector in WITH_STATE}
    names = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ.update(names, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # not used: a file is
    dist.init_process_group("gloo", init_method=f"file://{folder}/sync", rank=rank, world_size=2)
    rows = range(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
    found: dict[str, Any] = {"batch": gradient_of(model, list(rows), True)}
    for detector in WITH_STATE:
        found[detector] = trained(f"{folder}/{detector}", detector, 4, parts[detector])
    torch.save(found, f"{folder}/{rank}.pt")
    end_rank()


def test_two_processes_are_one(tmp_path: Path) -> None:
    spawn(rank_of, (str(tmp_path),), nprocs=2)
    loss, gradient = gradient_of(small_model(), list(range(sum(SIZES))), False)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for found in ranks:
        torch.testing.assert_close(found["batch"][0], loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["batch"][1], gradient, rtol=1e-3, atol=1e-5)
    for detector in WITH_STATE:
        one = trained(str(tmp_path / "one" / detector), detector, 8, made(detector))
        for found in ranks:
            assert found[detector].keys() == one.keys()
            for name, value in one.items():
                torch.testing.assert_close(
                    found[detector][name], value, rtol=1e-3, atol=2e-5, msg=name
                )


def test_several_losses_resume_each_with_its_state(tmp_path: Path) -> None:
    from datasets import DatasetDict

    from kinfolk.integrations.sentence_transformers import KinfolkLoss

    def fresh(folder: Path) -> tuple[Any, dict[str, Any]]:
        dataset, model, one = made()
        other = kf.GloFND(num_samples=one.detectors[0].num_samples, alpha=0.4, init="quantile")
        losses = {"a": one, "b": KinfolkLoss(model, kf.CLIPLoss(temperature=0.2, detector=other))}
        args = arguments(folder, num_train_epochs=1, save_strategy="steps", save_steps=3)
        return trainer(model, losses, DatasetDict({"a": dataset, "b": dataset}), args), losses

    whole, losses = fresh(tmp_path)
    whole.train()
    resumed, others = fresh(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for key, loss in losses.items():
        for name, value in loss.state_dict().items():
            assert torch.equal(others[key].state_dict()[name], value), (key, name)
    dataset, model, clusters = made("ifnd")
    with pytest.raises(KinfolkError, match="needs one data set"):
        trainer(model, {"a": clusters}, DatasetDict({"a": dataset}), arguments(tmp_path)).train()
