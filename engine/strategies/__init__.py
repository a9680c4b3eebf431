"""Training strategies: each turns a batch into inputs and targets, and defines the loss that is optimised."""

from collections.abc import Callable

from pulsetrain.engine.argument_checks import answer_unknown_keywords
from pulsetrain.engine.step.protocols import TrainingStrategy
from pulsetrain.engine.strategies.dpo import DPOStrategy
from pulsetrain.engine.strategies.episodic_lstm import EpisodicLSTM
from pulsetrain.engine.strategies.familiar_names import remedies_for
from pulsetrain.engine.strategies.gaussian_head import GaussianHead
from pulsetrain.engine.strategies.grpo import GRPOStrategy
from pulsetrain.engine.strategies.kto import KTOStrategy
from pulsetrain.engine.strategies.ppo import PPOStrategy
from pulsetrain.engine.strategies.pretrain import PretrainStrategy
from pulsetrain.engine.strategies.reference_free import CPOStrategy, ORPOStrategy, SimPOStrategy
from pulsetrain.engine.strategies.reward_model import RewardModelStrategy
from pulsetrain.engine.strategies.sft import SFTStrategy
from pulsetrain.engine.strategies.supervised import SupervisedStrategy
from pulsetrain.engine.strategies.value_head import WithValueHead

__all__ = [
    "STRATEGIES",
    "CPOStrategy",
    "DPOStrategy",
    "EpisodicLSTM",
    "GRPOStrategy",
    "GaussianHead",
    "KTOStrategy",
    "ORPOStrategy",
    "PPOStrategy",
    "PretrainStrategy",
    "RewardModelStrategy",
    "SFTStrategy",
    "SimPOStrategy",
    "SupervisedStrategy",
    "WithValueHead",
]

# by the name that a configuration uses
STRATEGIES: dict[str, Callable[[], TrainingStrategy]] = {
    "supervised": SupervisedStrategy,
    "pretrain": PretrainStrategy,
    "sft": SFTStrategy,
    "dpo": DPOStrategy,
    "cpo": CPOStrategy,
    "simpo": SimPOStrategy,
    "orpo": ORPOStrategy,
    "kto": KTOStrategy,
    "reward_model": RewardModelStrategy,
    "ppo": PPOStrategy,
    "grpo": GRPOStrategy,
}

for _kind in (
    *(PretrainStrategy, SFTStrategy, DPOStrategy, CPOStrategy, SimPOStrategy, ORPOStrategy, KTOStrategy),
    *(RewardModelStrategy, PPOStrategy, GRPOStrategy),
):
    answer_unknown_keywords(_kind, remedies_for(_kind))
