"""The memory of a run: what it needs, by component, phase and module."""
