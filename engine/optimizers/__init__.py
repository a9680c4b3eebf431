"""Optimizers by name: validated arguments, decay groups, rates per layer, and fused kernels where they pay."""

from engine.optimizers.create import create_optimizer, resolve_optimizer
from engine.optimizers.functional import create_functional
from engine.optimizers.groups import DecayRule, LayerRates
from engine.optimizers.muon import MuonRule, MuonWithAdamW
from engine.optimizers.named import NamedOptimizers, parts_of
from engine.optimizers.schedule_free import averaged_weights, is_schedule_free

__all__ = [
    "DecayRule",
    "LayerRates",
    "MuonRule",
    "MuonWithAdamW",
    "NamedOptimizers",
    "averaged_weights",
    "create_functional",
    "create_optimizer",
    "is_schedule_free",
    "parts_of",
    "resolve_optimizer",
]
