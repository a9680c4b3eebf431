"""The event log: its format, its writer and its readers."""
