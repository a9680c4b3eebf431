"""Rollouts: batches that the policy generates itself, in environments or as texts, for the ordinary run loop."""

from pulsetrain.engine.rollouts.base import Rollouts
from pulsetrain.engine.rollouts.environment import EnvironmentRollouts
from pulsetrain.engine.rollouts.text import TextRollouts

__all__ = ["EnvironmentRollouts", "Rollouts", "TextRollouts"]
