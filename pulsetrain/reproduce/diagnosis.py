"""Why a run did not come again: what is another than when it was recorded, the likeliest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pulsetrain.engine.environment import environment_differences
from pulsetrain.engine.recording import Divergence, LoggedEvent
from pulsetrain.handlers.recorder.fingerprints import FingerprintEvents

__all__ = ["Cause", "Evidence", "causes_of"]

STATE, BATCH = FingerprintEvents.STATE_FINGERPRINTED.value, FingerprintEvents.BATCH_FINGERPRINTED.value


@dataclass(frozen=True)
class Cause:
    """One that would explain it."""

    kind: str  # such as "weights", "settings", "data", "random numbers", "non-deterministic", "environment", "code"
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True)
class Evidence:
    """What is known beside the first event that differs."""

    divergence: Divergence
    state: tuple[LoggedEvent, LoggedEvent] | None  # the first fingerprints behind the difference, recorded and now
    weights_at_start: Sequence[str]  # parts whose fingerprint at the checkpoint is not that of the log
    at_the_beginning: bool  # of the run, which was not begun at a checkpoint: nothing had been trained
    repeats: bool | None  # whether the same comes when it is run once more; None where that was not tried
    fingerprints: bool  # whether the log holds any
    recorded: Mapping[str, Any]  # run.json
    now: Mapping[str, Any]  # the same of the trainer that ran again


def causes_of(evidence: Evidence) -> tuple[Cause, ...]:
    """Those that the evidence speaks for, the likeliest first; never empty."""
    found = [*_of_the_start(evidence), *_of_the_event(evidence), *_of_the_surroundings(evidence)]
    if not found:
        text = "the same comes each time it is run again, so the code or its inputs have changed"
        if not evidence.fingerprints:
            text += "; with Fingerprints(Every(updates=1), batches=True) among the handlers a log says more"
        found.append(Cause("code", text))
    return tuple(found)


def _of_the_start(evidence: Evidence) -> list[Cause]:
    if not evidence.weights_at_start:
        return []
    parts = " and ".join(evidence.weights_at_start)
    return [Cause("weights", f"the checkpoint's {parts} are not what the run had there: it is damaged or was replaced")]


def _of_the_event(evidence: Evidence) -> list[Cause]:
    was, now, fields = evidence.divergence.a, evidence.divergence.b, evidence.divergence.fields
    found = []
    settings = _changed(evidence, "settings")
    if settings:
        found.append(Cause("settings", "; ".join(settings)))
    if now.event == was.event == BATCH:
        found.append(
            Cause("data", "another batch came: the data, their order, or what is drawn in reading them is another")
        )
    if any(name == "lr" or name.startswith(("lr.", "payload.learning_rates")) for name in fields):
        found.append(Cause("learning rate", "the schedule, or the rate that the optimizer was given, is another"))
    if evidence.repeats is False:
        found.append(
            Cause(
                "non-deterministic",
                "run again twice from the same place, it came out differently: a kernel, a thread or something outside "
                "draws lots; torch.use_deterministic_algorithms(True) names such kernels",
            )
        )
    elif _generators_differ(evidence):
        text = "something draws from the global generators that did not then, or no longer does"
        if evidence.at_the_beginning:
            text += "; in the making of the model perhaps: another model, or other code"
        found.append(Cause("random numbers", text))
    if "event" in fields or "engine" in fields:
        found.append(Cause("handlers", f"{now.engine} fired {now.event} in place of {was.engine}'s {was.event}"))
    return found


def _generators_differ(evidence: Evidence) -> bool:
    sides = evidence.state
    return sides is not None and sides[0].payload.get("rng") != sides[1].payload.get("rng")


def _of_the_surroundings(evidence: Evidence) -> list[Cause]:
    found = []
    environment = _changed(evidence, "environment")
    if environment:
        found.append(Cause("environment", "; ".join(environment)))
    handlers = _names(evidence.recorded.get("handlers")), _names(evidence.now.get("handlers"))
    if handlers[0] != handlers[1]:
        found.append(Cause("handlers", f"{handlers[0]} were attached, now {handlers[1]}"))
    git = evidence.recorded.get("git"), evidence.now.get("git")
    if git[0] != git[1] and None not in git:
        found.append(Cause("code", f"git: {_commit(git[0])} -> {_commit(git[1])}"))
    return found


def _changed(evidence: Evidence, part: str) -> list[str]:
    recorded, now = evidence.recorded.get(part), evidence.now.get(part)
    if not isinstance(recorded, Mapping) or not isinstance(now, Mapping):
        return []
    return environment_differences(recorded, now)


def _names(handlers: Any) -> str:
    return ", ".join(handlers) if handlers else "none"


def _commit(git: Any) -> str:
    return f"{str(git['commit'])[:10]}{' with changes' if git['changed'] else ''}"
