"""What resumes, logs and verifications may claim of a run that was killed: each function lists the false claims."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from pulsetrain.cli import main
from pulsetrain.engine.checkpoint import CheckpointManager, load_checkpoint
from pulsetrain.engine.checkpoint.reader import step_of
from pulsetrain.engine.errors import RecordingError
from pulsetrain.engine.recording import EventLog, LoggedEvent
from tests.faults.victims import Victim

REPRODUCED, NOT_REPRODUCED, DAMAGED = 0, 1, 3  # exit statuses of `pulsetrain verify`
LOSSES = ("the event log is damaged", "the event log has lost events")  # how warnings begin
DIFFERS = "resumed, but an event differs from the one in the log"


class Start(NamedTuple):
    """Where an attempt starts, read before it does."""

    iteration: int  # of the newest checkpoint; 0 without one
    comparable: bool  # whether the log holds a loss or a norm after it


def start_of(folder: Path) -> Start:
    newest = CheckpointManager(folder / "checkpoints").get_latest() if (folder / "checkpoints").is_dir() else None
    if newest is None:
        return Start(0, False)
    (recorder,) = (each for key, each in load_checkpoint(newest)["handlers"].items() if key == "EventRecorder")
    try:
        after = EventLog(folder).read(
            event=("iteration_completed", "gradients_ready"), seq=(recorder["state"]["seq"] + 1, None), superseded=True
        )
        return Start(step_of(newest), any(event.output or event.payload for event in after))
    except RecordingError:
        return Start(step_of(newest), False)


def false_claims_of_attempt(
    victim: Victim, start: Start, said: list[dict[str, Any]], *, log_was_cut: bool, lacked: bool
) -> Iterator[str]:
    """What a resumed run said wrongly, or did not say.

    Args:
        victim: the kind of run.
        start: where it resumed.
        said: its log messages.
        log_was_cut: whether the run's log has lost something, now or before.
        lacked: whether the run has resumed without that attribute before: the log's newest events are computed
            without it, too, and may be reproduced.
    """
    lacks = bool(victim.lacks) and start.iteration > victim.lacks_after
    allowed = victim.warnings + (LOSSES if log_was_cut else ()) + ((DIFFERS,) if lacks else ())
    for line in said:
        if line["level"] in ("warning", "error", "critical") and not line["event"].startswith(allowed):
            yield f"a false alarm: {line}"
        if "exactly" in line["event"] and not (start.comparable and line["after_update"] > 0):
            yield f"nothing was compared: {line}"
        if "exactly" in line["event"] and lacks and not lacked:
            yield f"the checkpoint lacked {victim.lacks}: {line}"
    if lacks and said:
        named = [line for line in said if line["event"].startswith("the checkpoint lacks state")]
        if not any(victim.lacks in line["attributes"] for line in named):
            yield f"the resume from iteration {start.iteration} does not name {victim.lacks}"


def false_claims_of_checkpoints(victim: Victim, folder: Path) -> Iterator[str]:
    """The checkpoints whose manifests do not name what they lack, or name more."""
    for saved in CheckpointManager(folder / "checkpoints").valid():
        manifest = json.loads((saved / "manifest.json").read_text())
        named = manifest.get("unsaved", {}).get("changed", [])
        expected = [victim.lacks] if victim.lacks and step_of(saved) > victim.lacks_after else []
        if named != expected:
            yield f"{saved.name} names {named} as unsaved, and lacks {expected}"


def false_claims_of_log(
    victim: Victim, folder: Path, saves: dict[str, Any], expected: dict[int, LoggedEvent], differs: bool
) -> Iterator[str]:
    """What `events --check` and `verify` say wrongly of a finished run.

    Args:
        victim: the kind of run.
        folder: the run's.
        saves: the arguments of its Checkpointer.
        expected: the events of a run that was never killed, by their place in the order.
        differs: whether an event is in both logs, and differs.
    """
    log = EventLog(folder)
    places = {event.ord for event in log.read() if event.ord >= 0 and not event.open}
    missing = [event for ord, event in expected.items() if ord not in places]
    damage = log.verify()
    if missing and not damage:
        yield f"the log lacks {len(missing)} events, and shows no damage"
    if damage and not victim.loses_log:
        yield f"a false alarm of the log: {damage}"
    status, text = called("events", str(folder), "--check")
    if status != (DAMAGED if damage else REPRODUCED):
        yield f"events --check ends with status {status}: {text}"
    status, text = verified(victim, folder, saves)
    allowed = {NOT_REPRODUCED} if differs else {DAMAGED} if missing else {REPRODUCED, DAMAGED if damage else REPRODUCED}
    if status not in allowed:
        yield f"verify ends with status {status}, not {sorted(allowed)}, {len(missing)} events are missing: {text}"
    unseen = {event.iteration for event in missing if event.engine == log.main_engine}
    if missing and not covers(text, unseen):
        yield f"verify does not name the iterations {sorted(unseen)}: {text}"
    if missing and ": reproduced" in text:
        yield f"verify calls it reproduced, {len(missing)} events are missing: {text}"


def verified(victim: Victim, folder: Path, saves: dict[str, Any]) -> tuple[int, str]:
    """`pulsetrain verify` of a run that no configuration describes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "pulsetrain.cli.verify.rebuild", lambda run, to: SimpleNamespace(trainer=victim.make(to, **saves))
        )
        return called("verify", str(folder))


def called(*arguments: str) -> tuple[int, str]:
    """The exit status and the output of the command."""
    text = io.StringIO()
    with redirect_stdout(text), redirect_stderr(text):
        status = main(list(arguments))
    return status, text.getvalue()


def covers(text: str, iterations: set[int]) -> bool:
    """Whether each iteration is inside of a range that the text names."""
    ranges = re.findall(r"iterations? (\d+) (?:to|and) (\d+|the end)", text)
    return all(any(int(a) <= i and (b == "the end" or i <= int(b)) for a, b in ranges) for i in iterations)
