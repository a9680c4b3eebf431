"""The memory of a run: what it needs, and ways to need less."""
