"""The data order, data workers, random numbers, and batches of sequences."""
