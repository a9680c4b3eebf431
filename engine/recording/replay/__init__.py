"""Replaying an event log through handlers."""
