"""Run folders with logs of a few events, written without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import yaml

from pulsetrain.engine.recording import LoggedEvent, LogWriter
from pulsetrain.engine.recording.log.non_finite import finite_or_text

SECOND = 1_000_000_000
BEGUN = 1_790_000_000 * SECOND  # nanoseconds since 1970


def write_run(
    folder: Path,
    losses: list[float] = (),  # type: ignore[assignment]  # of validations, one an epoch
    end: str | None = "completed",
    *,
    reason: str = "",
    rate: float = 0.1,
    epochs: int = 4,
    iterations: int = 5,
    parent: dict[str, Any] | None = None,
    closed: bool = True,
    last: float = 0.0,
) -> Path:
    """A run whose epochs have that many iterations, a second each; `end` is the event that ends it."""
    folder.mkdir(parents=True)
    described = {
        "format": 1, "id": folder.name, "created": "2026-09-21T12:53:20+0000", "settings": {"max_epochs": epochs},
        "modes": {}, **({"parent": parent} if parent else {}),
    }  # fmt: skip
    (folder / "run.json").write_bytes(msgspec.json.encode(described))
    settings = {"model": "Net", "training": {"max_epochs": epochs, "learning_rate": rate}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    writer = LogWriter(folder / "events", run=folder.name)
    bounds = {"max_epochs": epochs, "total_iterations": epochs * iterations}
    events: list[LoggedEvent] = [LoggedEvent(engine="trainer", event="started", observed=bounds)]
    for epoch, loss in enumerate(losses, start=1):
        for iteration in range((epoch - 1) * iterations + 1, epoch * iterations + 1):
            output = {"loss": 2 * loss}
            events.append(
                LoggedEvent(
                    engine="trainer", event="iteration_completed", epoch=epoch, iteration=iteration, output=output
                )
            )
        metrics = {"val/loss": finite_or_text(loss), "val/accuracy": finite_or_text(1 - loss), "val/other": 0.5}
        payload = {"metrics": metrics, "seconds": 1.0}
        at = {"epoch": epoch, "iteration": epoch * iterations}
        events.append(LoggedEvent(engine="trainer", event="validation_completed", payload=payload, **at))
    place = {"epoch": events[-1].epoch, "iteration": events[-1].iteration}
    if end is not None:
        payload = {"reason": reason} if end == "terminate" else None
        if end == "exception_raised":
            payload = {"error": {"__type__": "builtins.ValueError", "message": reason}}
        events.append(LoggedEvent(engine="trainer", event=end, payload=payload, **place))
        if end == "terminate":
            events.append(LoggedEvent(engine="trainer", event="completed", **place))
    for seq, event in enumerate(events):
        event.ord = event.seq = seq
        event.t = BEGUN + seq * SECOND + (round(last * SECOND) if seq == len(events) - 1 else 0)
        writer.add(event)
    if closed:
        writer.close()
    return folder


def content(folder: Path) -> dict[str, bytes]:
    """The bytes of every file in a folder."""
    return {str(each.relative_to(folder)): each.read_bytes() for each in sorted(folder.rglob("*")) if each.is_file()}


def write_counting_run(folder: Path) -> Path:
    """A run whose log has token counts: 100 an iteration."""
    writer = LogWriter(folder / "events")
    for seq in range(1, 11):
        at = {"epoch": 1, "iteration": seq // 2 + 1, "seq": seq, "t": BEGUN + seq}
        observed, payload = ({"tokens": 100 * at["iteration"]}, {"metrics": {"a": 0.5}}) if seq % 4 == 1 else (None, {})
        name = "metrics_logged" if payload else "iteration_completed"
        writer.add(
            LoggedEvent(seq, "trainer", name, payload=payload or None, observed=observed, output={"loss": 1.0}, **at)
        )
    writer.close()
    return folder
