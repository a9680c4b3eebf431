"""When to save, what to keep, and which checkpoint is the best."""
