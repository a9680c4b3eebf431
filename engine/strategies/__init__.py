"""Strategies: what is optimised."""

from collections.abc import Callable

from engine.protocols import TrainingStrategy
from engine.strategies.dpo import DPOStrategy
from engine.strategies.grpo import GRPOStrategy
from engine.strategies.ppo import PPOStrategy
from engine.strategies.pretrain import PretrainStrategy
from engine.strategies.sft import SFTStrategy
from engine.strategies.supervised import SupervisedStrategy
from engine.strategies.value_head import WithValueHead

__all__ = [
    "STRATEGIES",
    "DPOStrategy",
    "GRPOStrategy",
    "PPOStrategy",
    "PretrainStrategy",
    "SFTStrategy",
    "SupervisedStrategy",
    "WithValueHead",
]

STRATEGIES: dict[str, Callable[[], TrainingStrategy]] = {
    "supervised": SupervisedStrategy,
    "pretrain": PretrainStrategy,
    "sft": SFTStrategy,
    "dpo": DPOStrategy,
    "ppo": PPOStrategy,
    "grpo": GRPOStrategy,
}
