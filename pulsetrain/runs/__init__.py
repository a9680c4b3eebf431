"""Runs in the plural: what is known of each run folder below a folder, without training and without torch."""
