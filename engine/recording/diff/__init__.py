"""Comparing events: of two logs, and of a run with its log."""
