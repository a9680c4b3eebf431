"""Handlers that measure a run."""
