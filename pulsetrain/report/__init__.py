"""Reports of recorded runs: one page to look at, without a network."""

from pulsetrain.report.writing import Report, write_report

__all__ = ["Report", "write_report"]
