"""Rollouts: batches that the policy generates itself, in environments or as texts, for the ordinary run loop."""

from pulsetrain.engine.rollouts.base import Rollouts
from pulsetrain.engine.rollouts.conversation import ConversationRollouts, TextEnvironment
from pulsetrain.engine.rollouts.drawing import Sampling
from pulsetrain.engine.rollouts.environment import EnvironmentRollouts
from pulsetrain.engine.rollouts.server import ServerSampler
from pulsetrain.engine.rollouts.text import TextRollouts
from pulsetrain.engine.rollouts.tools import ToolEnvironment

__all__ = [
    "ConversationRollouts",
    "EnvironmentRollouts",
    "Rollouts",
    "Sampling",
    "ServerSampler",
    "TextEnvironment",
    "TextRollouts",
    "ToolEnvironment",
]
