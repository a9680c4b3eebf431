"""Callbacks of other frameworks as handlers."""
