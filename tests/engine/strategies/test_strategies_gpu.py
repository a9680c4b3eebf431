"""Strategies and rollouts on an accelerator."""

from __future__ import annotations

import pytest
import torch

from examples.byte_lm.model import ByteGPT
from examples.cartpole import ActorCritic
from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import DPOStrategy, GRPOStrategy, PPOStrategy, SFTStrategy, TorchBackend
from pulsetrain.engine.data.sequences import pack, pad_examples
from pulsetrain.engine.rollouts import EnvironmentRollouts, TextRollouts
from pulsetrain.engine.strategies import WithValueHead

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

CONFIG = {"max_epochs": 2, "learning_rate": 1e-2, "seed": 1, "device": "cuda"}
PROMPTS = [[3, 4], [5], [6, 7, 8], [9]]


def model() -> ByteGPT:
    torch.manual_seed(0)
    return ByteGPT(layers=1, width=16, heads=2, context=32, vocabulary=16)


def examples(shift: int) -> list[dict[str, list[int]]]:
    return [
        {"input_ids": [first, 4, first + shift, 0], "labels": [-100, -100, first + shift, 0]} for first in range(1, 9)
    ]


def moved(trainer: Trainer) -> bool:
    """Whether it has learnt, and where."""
    before = {name: each.clone() for name, each in trainer.model.state_dict().items()}
    trainer.train()
    after = trainer.model.state_dict()
    assert all(each.device.type == "cuda" and each.isfinite().all() for each in after.values())
    return any(not torch.equal(each, after[name]) for name, each in before.items())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_answers_and_preferences_are_learnt(precision: str):
    config = TrainingConfig(**CONFIG, precision=precision)
    padded, packed = pad_examples(examples(3)), pad_examples(pack(examples(3), 16))
    for batch in (padded, packed):
        assert moved(Trainer(model(), [batch], strategy=SFTStrategy(), backend=TorchBackend(), config=config))
    other = pad_examples(examples(5))
    pairs = {f"chosen_{name}": each for name, each in padded.items()}
    pairs |= {f"rejected_{name}": each for name, each in other.items()}
    trainer = Trainer(model(), [pairs], [pairs], strategy=DPOStrategy(), backend=TorchBackend(), config=config)
    assert moved(trainer)
    assert trainer.history.get_history()["val/reward_margin"][-1] > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_rewarded_is_learnt(precision: str):
    config = TrainingConfig(**CONFIG, precision=precision)

    def texts() -> TextRollouts:
        return TextRollouts(
            PROMPTS, lambda prompts, completions: [sum(each) / 16 for each in completions],
            max_new_tokens=6, prompts_per_rollout=4, end_token=0,
        )  # fmt: skip

    assert moved(Trainer(model(), texts(), strategy=GRPOStrategy(group_size=4, kl_coef=0.1), config=config))
    critic = WithValueHead(model(), head="head")
    assert moved(Trainer(critic, texts(), strategy=PPOStrategy(gamma=1.0, minibatch_size=2), config=config))


def test_a_policy_acts_in_an_environment():
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    rollouts = EnvironmentRollouts("CartPole-v1", environments=4, steps=16)
    trainer = Trainer(
        ActorCritic(4, 2), rollouts, strategy=PPOStrategy(minibatch_size=32), config=TrainingConfig(**CONFIG)
    )
    assert moved(trainer)
    assert len(rollouts.evaluate(episodes=2)) == 2
