"""Checkpoints of adapters of peft: they hold the adapters alone, and name the frozen weights by a digest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import CheckpointError, Every, TorchBackend
from pulsetrain.engine.checkpoint import CheckpointManager, load_checkpoint, load_weights
from pulsetrain.handlers import EMA, BestModel, Checkpointer
from tests.support.models_hugging_face import model_of, with_adapters
from tests.support.runs import cut_after

pytest.importorskip("transformers", reason="transformers is not there: pip install transformers")
pytest.importorskip("peft", reason="peft is not there: pip install peft")

pytestmark = pytest.mark.filterwarnings("ignore")  # what the packages say of each other

ROWS = torch.randint(0, 64, (8, 12), generator=torch.Generator().manual_seed(0))


def adapted(seed: int = 0) -> nn.Module:
    found: nn.Module = with_adapters(model_of("llama", seed=seed), seed=1)
    return found


def trainer(folder: Path, model: nn.Module | None = None, *handlers: Any, functional: bool = False) -> Trainer:
    config = TrainingConfig(max_epochs=4, optimizer="adamw", learning_rate=0.02, seed=0)
    batches = [{"input_ids": each} for each in ROWS.split(2)]
    backend = TorchBackend("cpu", functional=functional)
    saver = Checkpointer(folder, Every(iterations=5))
    return Trainer(
        adapted() if model is None else model, batches, batches, strategy="pretrain", backend=backend, config=config,
        handlers=[saver, *handlers],
    )  # fmt: skip


def newest(folder: Path) -> Any:
    return CheckpointManager(folder / "checkpoints").valid()[-1]


def bytes_in(value: Any) -> int:
    """Of all tensors in a state."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(bytes_in, values))


@pytest.mark.parametrize("functional", [False, True], ids=["in place", "values"])
def test_a_checkpoint_has_the_adapters_alone_and_resumes_exactly(functional: bool, tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", functional=functional)
    losses = whole.train()["train/loss"]
    saved = load_checkpoint(newest(tmp_path / "whole"))
    assert saved["model"]
    assert all("lora_" in name for name in saved["model"])
    learning = [name for name, each in whole.model.named_parameters() if each.requires_grad]
    left_out = saved["modules"]["model"]["left_out"]
    frozen = [name for name, each in whole.model.named_parameters() if not each.requires_grad]
    assert sorted(left_out["names"]) == sorted(frozen)
    assert len(learning) == len(saved["model"])
    assert len(left_out["digest"]) == 32

    cut_after(trainer(tmp_path / "cut", functional=functional), 7)
    resumed = trainer(tmp_path / "cut", functional=functional)
    assert resumed.train(resume="latest")["train/loss"] == losses
    for name, each in dict(resumed.model.named_parameters()).items():
        assert torch.equal(each, dict(whole.model.named_parameters())[name]), name


def test_it_takes_the_bytes_of_the_adapters_and_not_of_the_base(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    run = trainer(small, None, BestModel())
    run.train()
    base = sum(each.numel() * 4 for each in run.model.parameters() if not each.requires_grad)
    unfrozen = adapted()
    for each in unfrozen.parameters():
        each.requires_grad_()
    trainer(large, unfrozen).train()
    saved = load_checkpoint(newest(small))
    assert bytes_in(load_checkpoint(newest(large))) > 3 * base  # weights and two averages of each
    assert bytes_in(saved) < base
    assert bytes_in([saved["model"], saved["optimizer"], saved["handlers"]]) < base / 4
    (kept,) = [each["state"]["weights"] for name, each in saved["handlers"].items() if "BestModel" in name]
    assert all("lora_" in name for name in kept)


def test_another_base_is_refused_and_the_run_stays_as_it_was(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    other = trainer(tmp_path, adapted(seed=7))
    before = {name: each.clone() for name, each in other.model.named_parameters()}
    message = (
        r"the frozen weights of the model are not those that the checkpoint's adapters were trained with \(digest "
        r"\w{32} in the checkpoint, \w{32} here\); make the model from the same files or the same seed"
    )
    with pytest.raises(CheckpointError, match=message):
        other.train(resume="latest")
    assert all(torch.equal(each, before[name]) for name, each in other.model.named_parameters())


def test_one_changed_number_of_the_base_is_noticed(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    model = adapted()
    with torch.no_grad():
        next(each for each in model.parameters() if not each.requires_grad).view(-1)[3] += 1e-6
    with pytest.raises(CheckpointError, match="the frozen weights of the model are not those"):
        trainer(tmp_path, model).train(resume="latest")


@pytest.mark.parametrize("functional", [False, True], ids=["in place", "values"])
def test_averages_of_the_adapters_are_loaded_for_inference(functional: bool, tmp_path: Path) -> None:
    average = EMA(0.9)
    run = trainer(tmp_path, None, average, functional=functional)
    run.train()
    model = adapted()
    assert not load_weights(model, newest(tmp_path))
    loaded = model.state_dict()
    own = {name: each.clone() for name, each in run.model.state_dict().items()}
    with average.applied():
        averaged = run.model.state_dict()
        adapters = [name for name in own if "lora" in name]
        assert adapters
        assert all(torch.equal(loaded[name], averaged[name]) for name in adapters)
    assert not all(torch.equal(loaded[name], own[name]) for name in adapters)


def test_weights_are_loaded_for_inference_into_a_model_with_the_same_base(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.train()
    model = adapted()
    assert not load_weights(model, newest(tmp_path))
    with torch.no_grad():
        assert torch.equal(model.eval()(ROWS).logits, run.model.eval()(ROWS).logits)
    other = adapted(seed=7)
    before = {name: each.clone() for name, each in other.named_parameters()}
    with pytest.raises(CheckpointError, match=r"load_weights\(.*\): the frozen weights of the model are not those"):
        load_weights(other, newest(tmp_path))
    assert all(torch.equal(each, before[name]) for name, each in other.named_parameters())
    with pytest.raises(CheckpointError, match=r"the checkpoint leaves .* to the model, which has no such parameter"):
        load_weights(model_of("llama"), newest(tmp_path))


def test_a_checkpoint_that_has_the_base_still_resumes(tmp_path: Path) -> None:
    """As earlier versions wrote it."""
    whole = trainer(tmp_path / "whole")
    losses = whole.train()["train/loss"]
    cut = trainer(tmp_path / "cut")
    cut_after(cut, 7)
    path = newest(tmp_path / "cut")
    saved = load_checkpoint(path)
    frozen = {name: each.detach() for name, each in cut.model.named_parameters() if not each.requires_grad}
    saved["model"] = {**frozen, **saved["model"]}
    del saved["modules"]["model"]["left_out"]
    old = CheckpointManager(tmp_path / "old" / "checkpoints").save(saved, step=5)
    resumed = trainer(tmp_path / "old")
    assert resumed.train(resume=old)["train/loss"] == losses
    saved["model"]["unknown"] = torch.ones(1)
    strange = CheckpointManager(tmp_path / "strange" / "checkpoints").save(saved, step=5)
    with pytest.raises(CheckpointError, match=r"do not fit the model: unexpected: unknown \(1,\)"):
        trainer(tmp_path / "strange").train(resume=strange)


def test_a_model_without_adapters_is_saved_whole(tmp_path: Path) -> None:
    model = model_of("llama")
    model.model.embed_tokens.requires_grad_(False)
    trainer(tmp_path, model).train()
    saved = load_checkpoint(newest(tmp_path))
    assert "model.embed_tokens.weight" in saved["model"]
    assert "left_out" not in saved["modules"]["model"]
