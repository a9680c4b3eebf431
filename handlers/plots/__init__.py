"""Figures of a run, and the handler that draws them."""
