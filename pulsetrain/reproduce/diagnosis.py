"""Ranks the likely reasons why a run was not reproduced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from pulsetrain.engine import Topology
from pulsetrain.engine.recording import Divergence, LoggedEvent
from pulsetrain.engine.recording.diff.environments import environment_differences
from pulsetrain.engine.recording.log.records import Json
from pulsetrain.handlers.recorder.fingerprints import FingerprintEvents

__all__ = ["BATCH", "CONTINUED", "STATE", "Cause", "Evidence", "diagnose"]

CONTINUED = "the run continued"  # in place of the event that ended another one
STATE, BATCH = FingerprintEvents.STATE_FINGERPRINTED.value, FingerprintEvents.BATCH_FINGERPRINTED.value
_TOPOLOGY = ("processes", "virtual", "reduction")  # entries of an environment


@dataclass(frozen=True)
class Cause:
    """A likely reason.

    >>> print(Cause("settings", "training.learning_rate: 0.1 -> 0.2"))
    settings: training.learning_rate: 0.1 -> 0.2
    """

    kind: str
    """Such as "weights", "topology", "settings", "data", "random numbers", "non-deterministic", or "code"."""
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True)
class Evidence:
    """The first event that differs, and what else is known about the two runs."""

    divergence: Divergence
    state: tuple[LoggedEvent, LoggedEvent] | None  # the first fingerprints after the difference, recorded and now
    changed_at_start: Sequence[str]  # parts whose fingerprint at the checkpoint differs from the log's
    from_scratch: bool  # no checkpoint was loaded, and nothing had been trained before the difference
    repeats: bool | None  # whether another rerun gives the same events; None if that was not tried
    has_fingerprints: bool  # whether the log holds any
    recorded: Mapping[str, Json]  # run.json
    now: Mapping[str, Json]  # the same facts of the trainer that ran again
    trained_by: Sequence[int] = ()  # how many processes have recorded it, if not as many as have run it again


def diagnose(evidence: Evidence) -> tuple[Cause, ...]:
    """The causes that the evidence suggests, the likeliest first; never empty."""
    found = [
        *_from_start(evidence),
        *_from_topology(evidence),
        *_from_event(evidence),
        *_from_environment(evidence),
        *_from_processes(evidence),
    ]
    if not found:
        text = "every rerun gives the same events, so the code or its inputs have changed since the recording"
        if not evidence.from_scratch:
            text += ", or, after a checkpoint, the run depends on state that no checkpoint holds"
        if not evidence.has_fingerprints:
            text += "; with the handler Fingerprints(Every(updates=1), batches=True), the log would show more"
        found.append(Cause("code", text))
    return tuple(found)


def _from_start(evidence: Evidence) -> list[Cause]:
    found = []
    was, now = evidence.recorded.get("weights"), evidence.now.get("weights")
    if was and now and was != now:
        found.append(Cause("weights", f"{_counts(was)} were recorded, the model now has {_counts(now)}"))
    if evidence.changed_at_start:
        parts = " and ".join(evidence.changed_at_start)
        text = f"the checkpoint's {parts} differ from those that the run had there: it is damaged or was replaced"
        found.append(Cause("weights", text))
    return found


def _from_topology(evidence: Evidence) -> list[Cause]:
    """How processes share the model and the batches out."""
    usual, before, after = asdict(Topology()), evidence.recorded.get("parallel"), evidence.now.get("parallel")
    changed = [each for each in _changed(evidence, "environment") if _is_of_topology(each)]
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        changed += environment_differences({**usual, **before}, {**usual, **after})
    if not changed:
        return []
    text = "; ".join(dict.fromkeys(changed))
    return [Cause("topology", f"{text}: sums over processes are made in another order, of other shares")]


def _from_processes(evidence: Evidence) -> list[Cause]:
    """How many processes there are, on which the results of virtual ranks do not depend."""
    if not evidence.trained_by:
        return []
    counts = " and then ".join(map(str, evidence.trained_by))
    text = f"number of processes: {counts} when it was recorded, another one now; with virtual ranks, results do not "
    text += "depend on it, unless the user's code reads the rank or the number of processes"
    return [Cause("topology", text)]


def _is_of_topology(difference: str) -> bool:
    return difference.partition(":")[0] in _TOPOLOGY


def _from_event(evidence: Evidence) -> list[Cause]:
    was, now, fields = evidence.divergence.a, evidence.divergence.b, evidence.divergence.fields
    found = []
    if settings := _changed(evidence, "settings"):
        found.append(Cause("settings", "; ".join(settings)))
    is_other_event = "event" in fields or "engine" in fields  # whose fields say nothing about the first one's
    if CONTINUED in (was.event, now.event):
        found.append(Cause("end", _other_end(was, now)))
    elif is_other_event:
        found.append(Cause("handlers", f"{now.engine} fired {now.event} in place of {was.engine}'s {was.event}"))
    elif now.event == BATCH:
        found.append(Cause("data", "the batch differs: the data, their order or their random augmentation has changed"))
    elif any(name == "lr" or name.startswith(("lr.", "payload.learning_rates")) for name in fields):
        found.append(Cause("learning rate", "the schedule, or the rate of the optimizer, has changed"))
    if evidence.repeats is False:
        text = "two reruns from the same checkpoint differ: a kernel, a thread or an outside input is random, or "
        text += "something that outlives a run in the process has changed, as an attribute of a class or a global; "
        found.append(Cause("non-deterministic", text + "torch.use_deterministic_algorithms(True) names such kernels"))
    elif _generators_differ(evidence):
        text = "the global generators are used more or less often than in the recorded run"
        if evidence.from_scratch:
            text += "; possibly when the model is made: another model, or changed code"
        found.append(Cause("random numbers", text))
    return found


def _other_end(was: LoggedEvent, now: LoggedEvent) -> str:
    ended, other = (was, "this one") if now.event == CONTINUED else (now, "the recorded run")
    whose = "the recorded run" if ended is was else "this run"
    how = f" ({ended.payload['reason']})" if isinstance(ended.payload, dict) and "reason" in ended.payload else ""
    text = f"{whose} was ended by {ended.event}{how}, and {other} continued: what ended it has changed, or depends on "
    return text + "something that no recording holds, such as the clock; then call terminate(observed=True)"


def _generators_differ(evidence: Evidence) -> bool:
    sides = evidence.state
    return sides is not None and sides[0].payload.get("rng") != sides[1].payload.get("rng")


def _from_environment(evidence: Evidence) -> list[Cause]:
    found = []
    if environment := [each for each in _changed(evidence, "environment") if not _is_of_topology(each)]:
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


def _counts(weights: Mapping[str, int]) -> str:
    return " and ".join(f"{count:,} values of {kind}" for kind, count in weights.items())


def _names(handlers: Json) -> str:
    return ", ".join(handlers) if handlers else "none"


def _commit(git: Json) -> str:
    return f"{str(git['commit'])[:10]}{' with changes' if git['changed'] else ''}"
