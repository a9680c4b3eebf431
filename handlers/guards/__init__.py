"""Handlers that protect a run or end it."""
