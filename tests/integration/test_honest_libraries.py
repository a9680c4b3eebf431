"""Runs whose data and handlers hold objects of other packages, which keep caches, locks and counts of their own: no
save, resume or verification reports any of it as unsaved.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from torch.utils.data import DataLoader, Dataset

from pulsetrain.handlers import Callback
from pulsetrain.state.fingerprint import Fingerprint
from tests.support.cases import Cases, Make
from tests.support.models import pairs
from tests.support.runs_honest import BATCH, ROWS, check_that_no_state_is_reported_as_unsaved

CASES = Cases()
case = CASES.add

log = logging.getLogger("a run's own")
structured = structlog.get_logger()


class Asking(Dataset[Any]):
    """Asks what it holds for something at each row."""

    def __init__(self, held: Any, ask: Callable[[Any, int], object]) -> None:
        self.pairs, self.held, self.ask, self.log = pairs(ROWS), held, ask, log

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        self.ask(self.held, row)
        self.log.debug("row %d", row)
        return self.pairs[row]


def asking(held: Any, ask: Callable[[Any, int], object]) -> dict[str, Any]:
    return {"train_loader": DataLoader(Asking(held, ask), BATCH, shuffle=True)}


class Telling(Callback):
    """Logs with a logger of its module, one of its own, and one of the run's package."""

    def __init__(self) -> None:
        self.log, self.local = logging.getLogger("a handler's own"), threading.local()

    def on_epoch_end(self, trainer: Any, *_: object) -> None:
        self.local.epochs = getattr(self.local, "epochs", 0) + 1
        self.log.info("epoch %d", trainer.state.epoch)
        log.info("epoch %d", trainer.state.epoch)
        structured.debug("an epoch ended")


@case()
def loggers_and_values_of_a_thread() -> dict[str, Any]:
    return {"callbacks": [Telling()]}


@case()
def accessors_and_indexes_of_pandas() -> dict[str, Any]:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"text": [f"row {n % 3}" for n in range(ROWS)], "number": range(ROWS)})
    frame.index = [f"key {n}" for n in range(ROWS)]
    held = {"frame": frame, "text": frame["text"], "groups": frame.groupby("text"), "index": frame.index}

    def ask(held: Any, row: int) -> None:
        held["text"].str.len()
        held["frame"].loc[f"key {row}"]
        held["index"].get_loc(f"key {row}")
        assert held["groups"].ngroups == 3
        assert held["frame"].index.is_unique

    return asking(held, ask)


@case()
def rows_of_a_sparse_matrix() -> dict[str, Any]:
    sparse = pytest.importorskip("scipy.sparse")
    return asking(sparse.csr_matrix(np.eye(ROWS)), lambda held, row: (held[row].toarray(), held.has_sorted_indices))


@case()
def arrays_of_a_file() -> dict[str, Any]:
    def open_file(folder: Any) -> Any:
        np.savez(folder / "arrays.npz", inputs=np.eye(ROWS))
        return np.load(folder / "arrays.npz")

    import tempfile

    return asking(open_file(Path(tempfile.mkdtemp())), lambda held, row: held["inputs"][row])


@case(pytest.mark.slow)
def a_run_of_wandb(monkeypatch: Any = None) -> dict[str, Any]:
    import tempfile

    wandb = pytest.importorskip("wandb")
    tracked = wandb.init(dir=tempfile.mkdtemp(), mode="offline", project="tests")

    class Tracking(Callback):
        def on_epoch_end(self, trainer: Any, *_: object) -> None:
            tracked.log({"epoch": trainer.state.epoch})

    return {"callbacks": [Tracking()]}


@pytest.mark.parametrize("make", CASES)
def test_no_state_is_reported_as_unsaved(make: Make, tmp_path: Path):
    check_that_no_state_is_reported_as_unsaved(make, tmp_path)


class Reading(dict[str, Any]):
    """Counts how often its items are read; it can be closed, as files that are mappings can."""

    reads = 0

    def items(self) -> Any:
        type(self).reads += 1
        return super().items()

    def close(self) -> None: ...


def test_what_can_be_closed_is_not_read():
    found = Fingerprint()
    found.add("data", Reading(rows=[0]))
    assert Reading.reads == 0
    assert found.unseen == {"data"}


def changes(held: Any, *changing: Callable[[], object]) -> list[bool]:
    """Which of these changes a fingerprint finds."""
    found = []
    for change in changing:
        before, after = Fingerprint(), Fingerprint()
        before.add("held", held)
        change()
        after.add("held", held)
        found.append(after.changed_since(before) == ["held"])
    return found


def test_of_many_pictures_the_first_are_read_and_of_the_others_a_sample():
    pictures = [np.zeros((64, 64, 3), np.uint8) for _ in range(2000)]
    write = [
        partial(pictures[5].__setitem__, (10, 10, 1), 1),
        partial(pictures[500].__setitem__, (0, 0, 0), 1),
        partial(pictures[500].__setitem__, (10, 10, 1), 1),
        partial(pictures.__setitem__, 1900, np.ones((64, 64, 3), np.uint8)),
    ]
    assert changes(pictures, *write) == [True, True, False, True]


def test_of_a_large_bytearray_a_sample_is_read():
    held = bytearray(1 << 22)
    write = [partial(held.__setitem__, 0, 1), partial(held.__setitem__, 1, 1), partial(held.append, 0)]
    assert changes(held, *write) == [True, False, True]
