"""Reports of recorded runs: one HTML page that works without a network."""

from pulsetrain.report.writing import Report, write_report

__all__ = ["Report", "write_report"]
