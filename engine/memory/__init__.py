"""What a training step keeps in memory, and what it does without."""

from engine.memory.activations import recompute_activations

__all__ = ["recompute_activations"]
