"""Strategies on logits that are split over processes: the losses and metrics of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pulsetrain.engine import DPOStrategy, MegatronBackend, MegatronGPT, PretrainStrategy, SFTStrategy
from pulsetrain.engine.data.sequences import IGNORED, pack, pad_examples
from pulsetrain.engine.losses import cross_entropy
from tests.support.runs_of_megatron import GPT, LLAMA, alone, apart, make, needs_megatron, texts, together, whole

pytestmark = needs_megatron


def chats() -> list[dict[str, Tensor]]:
    """Batches of rows whose prompts, of different lengths, are not trained on, nor is padding."""
    batches = []
    for seed in range(3):
        tokens, labels = texts(8, 17, seed), texts(8, 17, seed)
        for row in range(8):
            labels[row, : 2 + row] = IGNORED
            labels[row, 16 - row % 3 :] = IGNORED
        batches.append({"input_ids": tokens, "labels": labels})
    return batches


def packed() -> list[dict[str, Tensor]]:
    """Rows in which several documents follow each other."""
    documents = [texts(1, 3 + at % 5, at)[0].tolist() for at in range(40)]
    rows = pack([{"input_ids": each, "labels": each} for each in documents], 17)
    return [pad_examples(rows, length=17)]


def pairs() -> list[dict[str, Tensor]]:
    """Batches of preferences."""
    batches = []
    for seed in range(3):
        batch = {}
        for side, other in (("chosen", 0), ("rejected", 50)):
            tokens, labels = texts(4, 15, seed + other), texts(4, 15, seed + other)
            labels[:, :5] = IGNORED
            batch |= {f"{side}_input_ids": tokens, f"{side}_labels": labels}
        batches.append(batch)
    return batches


CASES: dict[str, dict[str, Any]] = {
    "sft": {"strategy": SFTStrategy, "data": chats},
    "smoothed": {"strategy": lambda: PretrainStrategy(loss_options={"label_smoothing": 0.1, "z_loss": 1e-3})},
    "chunked": {"strategy": lambda: PretrainStrategy(loss_options={"chunk_size": 16})},
    "packed": {"strategy": PretrainStrategy, "data": packed},
    "preferences": {"strategy": lambda: DPOStrategy(reference="copy"), "data": pairs},
    "accumulated": {"strategy": SFTStrategy, "data": chats, "config": {"accumulate": 3}},
}


@pytest.mark.parametrize("kind", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=[] if each == "sft" else pytest.mark.slow) for each in CASES]
)
def test_two_processes_learn_what_one_learns(case: str, kind: dict[str, Any]):
    chosen = CASES[case]

    def run(rank: int, tensor: int) -> Any:
        data = chosen["data"]() if "data" in chosen else None
        trainer = make(
            kind, tensor=tensor, strategy=chosen["strategy"](), data=data, val=data, max_epochs=4, learning_rate=1e-3,
            **chosen.get("config", {}),
        )  # fmt: skip
        history = trainer.train()
        return whole(trainer), history, trainer.state.tokens

    weights, history, tokens = alone(lambda rank: run(rank, 1))
    for found in together(lambda rank: run(rank, 2)):
        assert found[2] == tokens
        assert apart(found[0], weights) < 1e-4
        assert found[1].keys() == history.keys()
        for name in history:
            assert found[1][name] == pytest.approx(history[name], abs=1e-4), name


def test_the_loss_leaves_the_logits_as_they_are_and_has_the_gradient_of_the_cross_entropy():
    def run(rank: int) -> Any:
        model = MegatronBackend("cpu", tensor=2).build(MegatronGPT(**GPT))
        tokens, targets = texts(4, 16), texts(4, 16, 2)
        targets[0, :5] = IGNORED
        strategy = PretrainStrategy()
        outputs = model(tokens)
        before = outputs.part.detach().clone()
        batch = type("Batch", (), {"inputs": tokens, "targets": targets})
        loss = strategy.compute_loss(outputs, batch)
        loss.backward()
        assert outputs._whole is None
        kept = torch.equal(outputs.part, before)
        gradients = [each.grad.full_tensor().tolist() for each in model.parameters()]
        model.zero_grad()
        plain = cross_entropy(model(tokens).logits, targets)
        plain.backward()
        others = [each.grad.full_tensor().tolist() for each in model.parameters()]
        far = max(
            float((torch.tensor(a) - torch.tensor(b)).abs().max()) for a, b in zip(gradients, others, strict=True)
        )
        return kept, loss.item(), plain.item(), far, outputs.shape

    for kept, loss, plain, far, shape in together(run):
        assert kept
        assert loss == pytest.approx(plain, abs=1e-6)
        assert far < 1e-6
        assert shape == (4, 16, 64)


@pytest.mark.parametrize("field", ["input_ids", "labels"])
def test_a_token_outside_the_vocabulary_is_refused_in_each_step(field: str):
    def run(rank: int) -> str:
        data = chats()
        data[2][field][3, 6] = 64
        trainer = make(GPT, tensor=2, strategy=SFTStrategy(), data=data)
        with pytest.raises(ValueError, match="64") as refused:
            trainer.train()
        assert trainer.state.update == 2
        return str(refused.value)

    for message in together(run):
        assert f"{'targets' if field == 'labels' else field}[3, " in message
        assert "from 0 to 63" in message
