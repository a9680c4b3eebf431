"""Data order, loader workers, random numbers, and batches of token sequences."""
