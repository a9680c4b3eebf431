"""The event recorder, and digests that it can record."""
