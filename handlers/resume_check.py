"""Compares what a resumed run computes again with what the log holds of it: a proof, or the place where it fails."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

__all__ = ["ResumeCheck", "compared"]

# whose moment or content hangs on the clock, on a signal, or on where a run was cut
_NOT_COMPARED = frozenset(
    {
        "started", "completed", "epoch_started", "get_batch_started", "get_batch_completed", "terminate", "interrupt",
        "terminate_single_epoch", "exception_raised", "checkpoint_saved", "checkpoint_loaded", "preempted",
        "handler_failed",
    }
)  # fmt: skip
_OBSERVED = frozenset({"seconds", "samples_per_second", "tokens_per_second"})  # keys of payloads
_COMPARED = ("payload", "output", "metrics", "lr")

_Key = tuple[str, str, int, int, int]  # engine, event, epoch, iteration, and which of several


class ResumeCheck:
    """The events that a log holds past a checkpoint, and whether the same come again: floats by their bits.

    Args:
        expected: the records past the checkpoint, in the order of the log.
    """

    def __init__(self, expected: list[dict[str, Any]]) -> None:
        seen: Counter[tuple[Any, ...]] = Counter()
        self._expected = {key: compared(record) for record in expected if (key := _key(record, seen)) is not None}
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self.agreed = 0
        self.difference: str | None = None  # the first, both sides of it

    @classmethod
    def of_log(cls, path: Path, checkpoint: str) -> ResumeCheck | None:
        """For a run that goes on from the checkpoint folder of this name; None where the log holds nothing past it.

        Of several attempts to go on from it the longest counts.
        """
        attempts: list[list[dict[str, Any]]] = []
        if not path.exists():
            return None
        inside = False
        with path.open("rb") as file:
            for line in file:
                try:
                    record = json.loads(line)
                except ValueError:
                    continue  # cut by a crash
                if record.get("event") in ("checkpoint_saved", "checkpoint_loaded"):
                    saved = Path(str((record.get("payload") or {}).get("path", ""))).name
                    if record["event"] == "checkpoint_loaded" or saved == checkpoint:
                        inside = saved == checkpoint
                        attempts += [[]] if inside else []
                        continue
                if inside:
                    attempts[-1].append(record)
        longest = max(attempts, key=len, default=[])
        check = cls(longest)
        return check if check._expected else None

    @property
    def waiting(self) -> int:
        """How many of the log's events have not come again yet."""
        return len(self._expected)

    def see(self, line: bytes) -> None:
        """An event of the resumed run, as it is written."""
        record = json.loads(line)
        key = _key(record, self._seen)
        if key is None or self.difference is not None:
            return
        if key[1] == "iteration_completed":  # whatever belongs to an iteration that lies well behind stays away
            stayed_away = [each for each in self._expected if each[0] == key[0] and each[3] < key[3] - 1]
            if stayed_away:
                self.difference = f"{_named(stayed_away[0])} is in the log, and did not come again"
                return
        if key not in self._expected:
            return
        before, now = self._expected.pop(key), compared(record)
        if before == now:
            self.agreed += 1
            return
        sides = [
            f"{name}: {json.dumps(before.get(name))} in the log, {json.dumps(now.get(name))} now"
            for name in _COMPARED
            if before.get(name) != now.get(name)
        ]
        self.difference = f"{_named(key)}: {'; '.join(sides)}"


def _key(record: dict[str, Any], seen: Counter[tuple[Any, ...]]) -> _Key | None:
    event = record.get("event")
    if event in _NOT_COMPARED or not isinstance(event, str):
        return None
    place = (record.get("engine", ""), event, record.get("epoch", 0), record.get("iteration", 0))
    seen[place] += 1
    return (*place, seen[place])


def _named(key: _Key) -> str:
    return f"{key[0]}'s {key[1]} at epoch {key[2]}, iteration {key[3]}"


def compared(record: dict[str, Any]) -> dict[str, Any]:
    """What of a record must come again to the bit."""
    return {name: _without_observed(record[name]) for name in _COMPARED if name in record}


def _without_observed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_observed(item) for key, item in value.items() if key not in _OBSERVED}
    return [_without_observed(item) for item in value] if isinstance(value, list) else value
