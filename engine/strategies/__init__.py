"""Strategies: what is optimised."""

from collections.abc import Callable

from engine.protocols import TrainingStrategy
from engine.strategies.pretrain import PretrainStrategy
from engine.strategies.supervised import SupervisedStrategy

__all__ = ["STRATEGIES", "PretrainStrategy", "SupervisedStrategy"]

STRATEGIES: dict[str, Callable[[], TrainingStrategy]] = {"supervised": SupervisedStrategy, "pretrain": PretrainStrategy}
