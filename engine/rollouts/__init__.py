"""Data that the policy makes itself: rollouts in environments and of texts, as batches for the one run loop."""

from engine.rollouts.base import Rollouts
from engine.rollouts.environment import EnvironmentRollouts
from engine.rollouts.text import TextRollouts

__all__ = ["EnvironmentRollouts", "Rollouts", "TextRollouts"]
