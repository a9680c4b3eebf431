"""Stepping through a recorded run."""
