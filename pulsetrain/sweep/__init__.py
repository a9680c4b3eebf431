"""Sweeps: many runs of one configuration with different settings, and which of them is best."""
