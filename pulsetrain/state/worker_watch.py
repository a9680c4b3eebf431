"""Finds out in the workers of a DataLoader which attributes of the dataset change there, unsaved."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import c_char
from multiprocessing.sharedctypes import RawArray

from torch.utils.data import get_worker_info

from pulsetrain.state.fingerprint import Fingerprint
from pulsetrain.state.loader_parts import parts_in

__all__ = ["WorkerWatch"]

_BYTES = 2048  # of a worker's report: a flag that says whether it is complete, and names by lines


class WorkerWatch:
    """Compares fingerprints in each worker before its 1st, 2nd, 3rd, 5th, 9th ... batch, and reports what differs.

    Args:
        workers: how many there are.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._reports = RawArray(c_char, _BYTES * workers)
        self._batches = 0  # of this worker
        self._first: Fingerprint | None = None

    def look(self, parts: Mapping[str, object]) -> None:
        """A worker is about to read a batch; does nothing in the main process."""
        worker = get_worker_info()
        if worker is None or worker.id >= self._workers:
            return
        number, self._batches = self._batches, self._batches + 1
        if number & (number - 1):
            return
        now = Fingerprint()
        for path, part in parts_in(list(parts.items())):
            now.add_attributes(path, part)
        if self._first is None:
            self._first = now
        changed = "\n".join(now.changed_since(self._first)).encode()[: _BYTES - 1]
        if changed:
            report = self._report(worker.id)
            report[0] = 0
            report[1:] = changed.ljust(_BYTES - 1, b"\0")
            report[0] = 1

    def changed(self) -> set[str]:
        """The paths of what has changed in a worker so far."""
        reports = [bytes(self._report(worker)) for worker in range(self._workers)]
        complete = [each[1:].rstrip(b"\0").decode(errors="replace") for each in reports if each[0]]
        return {path for each in complete for path in each.splitlines()}

    def _report(self, worker: int) -> memoryview:
        return memoryview(self._reports).cast("B")[_BYTES * worker : _BYTES * (worker + 1)]
