"""Finding, scheduling and reporting learning rates."""
