"""Handlers that protect or end a run."""
