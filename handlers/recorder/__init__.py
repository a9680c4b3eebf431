"""The event recorder and what it writes."""
