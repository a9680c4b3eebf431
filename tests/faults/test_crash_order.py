"""A crash between any two calls of a save, with any unsynced calls on disk: no complete checkpoint is lost.

Every fsync is needed for it: without any one of them, one of these states breaks a claim.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import structlog

from pulsetrain.engine.checkpoint import CheckpointManager, Form, find_checkpoints, load_checkpoint
from pulsetrain.engine.errors import CheckpointError
from tests.faults.crashes import Call, Content, content_of, crashes, put, record

pytestmark = pytest.mark.slow

FOLDER = Path("run", "checkpoints")
NEW = 9  # `n` of the checkpoint that is saved while the machine may crash


class Save:
    """One save, recorded: what was there before, its calls, and what may be there after a crash.

    Args:
        earlier: `n` of the checkpoints there, in the order of writing.
        best: the one of them that is pointed to.
        form: of the one that is saved; earlier ones are of torch's.
    """

    def __init__(
        self, base: Path, *, earlier: tuple[int, ...], best: int | None, is_best: bool, form: Form = "torch"
    ) -> None:
        self.form = form
        self.latest, self.best, self.is_best = (earlier or (None,))[-1], best, is_best
        self.real, self.trial = base / "real", base / "trial"
        self.real.mkdir()
        if earlier:
            manager = CheckpointManager(self.real / FOLDER, keep_last_n=9)
            for n in earlier:
                manager.save({"n": n}, is_best=n == best, step=n)
        self.before = content_of(self.real)
        self.calls = record(self.real, self._save)
        self._seen: dict[Content, dict[str, Any]] = {}

    def _save(self, announce: Callable[[], None]) -> None:
        manager = CheckpointManager(self.real / FOLDER, keep_last_n=1)
        manager.save({"n": NEW}, is_best=self.is_best, step=NEW, announce=lambda path: announce(), form=self.form)

    @cached_property
    def syncs(self) -> list[int]:
        """The index of each fsync in the calls."""
        return [index for index, call in enumerate(self.calls) if call.name == "fsync"]

    def found_after(self, outcome: Content) -> dict[str, Any]:
        """What a reader and the next writer find in a state of the disk."""
        if outcome not in self._seen:
            shutil.rmtree(self.trial, ignore_errors=True)
            put(outcome, self.trial)
            with structlog.testing.capture_logs():
                self._seen[outcome] = self._look()
        return self._seen[outcome]

    def _look(self) -> dict[str, Any]:
        try:
            manager = CheckpointManager(self.trial / FOLDER)
            latest, best = manager.get_latest(), manager.get_best()
            damaged = len(find_checkpoints(manager.checkpoint_dir)) - len(manager.valid())
            found = {"latest": n_of(latest), "best": n_of(best), "damaged": damaged}
            found["dangling"] = best is None and (manager.checkpoint_dir / "best").exists()
            again = manager.save({"n": 10}, is_best=True)
            left = [path.name for path in manager.checkpoint_dir.glob(".*")]
            usable = manager.get_latest() == manager.get_best() == again and left == []
        except (CheckpointError, OSError) as error:
            return {"error": repr(error)}
        return {**found, "usable": usable}

    def broken(self, calls: list[Call]) -> Iterator[str]:
        """The crashes that break a claim."""
        announced = calls.index(Call("announce"))
        for count, outcome in crashes(self.before, calls):
            done = count > announced
            latest = {NEW} if done else {NEW, self.latest}
            best = {NEW} if self.is_best and done else {NEW, self.best} if self.is_best else {self.best}
            found = self.found_after(outcome)
            whole = found.get("usable") and found["damaged"] == 0 and not found["dangling"]
            if not (whole and found["latest"] in latest and found["best"] in best):
                yield f"after {count} calls: {found}"


def n_of(path: Path | None) -> int | None:
    return None if path is None else load_checkpoint(path)["n"]


SAVES = {
    "the first one, into a folder that is made": {"earlier": (), "best": None, "is_best": False},
    "the first one, which is best": {"earlier": (), "best": None, "is_best": True},
    "one more, and an older one is deleted": {"earlier": (1, 2), "best": 1, "is_best": False},
    "a better one, and all older ones are deleted": {"earlier": (1, 2), "best": 1, "is_best": True},
    "a better one than the last": {"earlier": (1,), "best": 1, "is_best": True},
    "a better one of the other form": {"earlier": (1, 2), "best": 1, "is_best": True, "form": "safetensors"},
}


@pytest.fixture(params=SAVES, scope="module")
def save(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Save:
    return Save(tmp_path_factory.mktemp("disk"), **SAVES[request.param])


def test_the_recorded_calls_lead_to_what_is_on_the_real_disk(save: Save):
    synced = [*save.calls, Call("fsync", FOLDER.parts)]
    assert [outcome for count, outcome in crashes(save.before, synced) if count == len(synced)] == [
        content_of(save.real)
    ]


def test_a_crash_anywhere_leaves_the_new_or_the_previous_checkpoint_and_the_announced_one_for_certain(save: Save):
    assert list(save.broken(save.calls)) == []


def test_without_any_one_sync_a_crash_would_lose_a_checkpoint(save: Save):
    assert len(save.syncs) >= 4  # the state, the manifest, the folder of both, the folder of that one
    not_needed = [
        save.calls[index] for index in save.syncs if not any(save.broken(save.calls[:index] + save.calls[index + 1 :]))
    ]
    assert not_needed == []


def test_announcing_before_the_last_sync_would_lose_a_checkpoint(save: Save):
    calls = [call for call in save.calls if call.name != "announce"]
    last = max(index for index in save.syncs if index < save.calls.index(Call("announce")))
    assert any(save.broken([*calls[:last], Call("announce"), *calls[last:]]))
