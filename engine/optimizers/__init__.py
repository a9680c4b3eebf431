"""Optimizers by name: validated arguments, weight-decay groups, rates per layer, and fused kernels where faster."""

from pulsetrain.engine.optimizers.create import create_optimizer, resolve_optimizer
from pulsetrain.engine.optimizers.description import describe_optimizer
from pulsetrain.engine.optimizers.functional import create_functional
from pulsetrain.engine.optimizers.groups import DecayRule, LayerRates
from pulsetrain.engine.optimizers.muon import MuonRule, MuonWithAdamW
from pulsetrain.engine.optimizers.named import NamedOptimizers, parts_of
from pulsetrain.engine.optimizers.options import LEARNING_RATE
from pulsetrain.engine.optimizers.schedule_free import averaged_weights, is_schedule_free

__all__ = [
    "LEARNING_RATE",
    "DecayRule",
    "LayerRates",
    "MuonRule",
    "MuonWithAdamW",
    "NamedOptimizers",
    "averaged_weights",
    "create_functional",
    "create_optimizer",
    "describe_optimizer",
    "is_schedule_free",
    "parts_of",
    "resolve_optimizer",
]
