"""Averages of weights."""
