"""What is kept of a run that fails or hangs."""
