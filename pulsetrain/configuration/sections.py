"""The sections of a configuration."""

from __future__ import annotations

__all__ = ["NAMED", "SECTIONS"]

SECTIONS = ("run", "model", "data", "strategy", "backend", "parallel", "metrics", "training", "handlers")
NAMED = ("model", "data", "strategy", "backend")  # sections that may be a class path alone
