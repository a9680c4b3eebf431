"""Reports of recorded runs: one HTML page that works without a network."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pulsetrain.report.writing import Report, write_report
else:  # imported when they are used: a page needs more than the curves of a run
    from pulsetrain.engine.lazy_names import lazy_names

    _, __getattr__, __dir__ = lazy_names(__name__, {"pulsetrain.report.writing": ("Report", "write_report")})

__all__ = ["Report", "write_report"]
