"""A run as a report shows it."""

from __future__ import annotations

from dataclasses import dataclass

from pulsetrain.report.facts import Facts
from pulsetrain.report.processes import Processes
from pulsetrain.report.record import RunRecord

__all__ = ["PALETTE", "ReportedRun"]

PALETTE = ("#2563eb", "#d97706", "#059669", "#9333ea", "#0891b2", "#be185d", "#65a30d", "#57534e")


@dataclass(frozen=True)
class ReportedRun:
    """A run in a report."""

    name: str  # unique in the report
    color: str
    record: RunRecord
    facts: Facts
    processes: Processes | None = None  # of several

    @property
    def damage(self) -> list[str]:
        """The damaged parts of its logs."""
        return [*self.record.damage, *(self.processes.damage if self.processes is not None else ())]

    @property
    def fork_iteration(self) -> int:
        """Where it was forked from its parent, if it has one."""
        at = (self.facts.parent or {}).get("iteration")
        return at if isinstance(at, int) else self.record.first_iteration or 0
