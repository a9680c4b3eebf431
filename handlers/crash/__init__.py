"""Evidence of a run that failed or hangs."""
