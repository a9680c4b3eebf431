"""When to save a checkpoint, which ones to keep, and which one is the best."""
