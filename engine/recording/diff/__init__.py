"""Comparing two event logs."""
