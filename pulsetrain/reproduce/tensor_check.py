"""Compares the tensors of a run that is repeated with those of the checkpoints that the run has saved."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pulsetrain.engine import CheckpointError, Events, Phase
from pulsetrain.engine.checkpoint import Location, find_checkpoints, load_checkpoint
from pulsetrain.engine.checkpoint.pieces import StoredTensor
from pulsetrain.engine.checkpoint.reader import step_of
from pulsetrain.engine.distributed.ranks import is_pipelined, is_sharded
from pulsetrain.engine.distributed.saved_shards import sharded_like
from pulsetrain.engine.distributed.shards import is_shard, local
from pulsetrain.state.older_formats import upgrade
from pulsetrain.trainer import Trainer

__all__ = ["TensorCheck", "final_line"]

_ENDS = (Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED, Events.COMPLETED)
_PARTS = ("model", "modules", "optimizer", "strategy", "handlers")
_UNREADABLE = "the checkpoint cannot be read"  # in place of the event of its save


class TensorCheck:
    """Compares tensors with those of each checkpoint, bit for bit: weights, buffers, averages, the optimizer's.

    They are compared at the event at which the Checkpointer saved, after the other handlers of that event; where the
    rerun does not fire it there, such as COMPLETED in the middle of a run that was extended, at the last event before.
    For a checkpoint that does not name its event, such as one that `save_checkpoint` made, the end of the iteration, of
    the epoch or of the run must agree. Handlers that the repeated run does not have, or has detached, are left out.
    Of several processes, the main one compares its tensors, or each its part of them.

    Args:
        trainer: it repeats the run.
        run: the run folder.
        detached: handlers of the trainer that see none of its events.
    """

    def __init__(self, trainer: Trainer, run: Path, detached: Collection[object] = ()) -> None:
        self._trainer, self._detached = trainer, detached
        start = trainer.state.iteration
        self._expected = {step: path for step, path in final_line(run).items() if step > start}  # not decided yet
        self._found: dict[int, str | None] = {}  # by iteration: the difference, None if the tensors agree
        self._before: dict[int, str | None] = {}  # the same, of an iteration whose event of the save has not come yet
        self._saved: tuple[int, Mapping[str, Any]] = (-1, {})  # the last checkpoint that was read, by its iteration
        for event in _ENDS:
            trainer.add_event_handler(event, self._look, event.value, phase=Phase.PERSIST)

    @property
    def agreed(self) -> list[int]:
        """The iterations whose checkpoints have the same tensors."""
        return sorted(step for step, difference in self._found.items() if difference is None)

    @property
    def difference(self) -> str | None:
        """The first tensor that differs, with its checkpoint."""
        return next((found for _, found in sorted(self._found.items()) if found is not None), None)

    def end_at(self, iteration: int) -> None:
        """Leave out the checkpoints after this iteration, which the trainer may still go through."""
        self._expected = {step: path for step, path in self._expected.items() if step <= iteration}

    def _look(self, event: str) -> None:
        step = self._trainer.state.iteration
        if step not in self._before:  # the run continued without that event
            self._found.update(self._before)
            self._before.clear()
        path = self._expected.get(step)
        if path is None:
            return
        found, moment = self._compared(step, path)
        if moment == _UNREADABLE:
            del self._expected[step]
            self._found[step] = found
            return
        if moment is not None and event != moment:
            self._before[step] = found
            return
        self._before.pop(step, None)
        self._found[step] = found
        if moment is not None or found is None:
            del self._expected[step]

    def _compared(self, step: int, path: Location) -> tuple[str | None, str | None]:
        """The difference, and the event of the save: the same in every process."""
        trainer = self._trainer
        control, found, moment = trainer.agreement.control, None, None
        if control.ranks.is_main or is_sharded(trainer.model):
            try:
                saved = self._read(step, path)
                now = trainer.checkpoint_state()
                saved = _of_layers(saved, now) if is_pipelined(trainer.model) else saved
                difference = _difference(saved, now, self._repeated())
            except CheckpointError as error:  # nothing to compare with
                found, moment = f"iteration {step}: {error}", _UNREADABLE
            else:
                found = difference and f"iteration {step}, checkpoint {path.name}: {difference}"
                moment = _moment_of(saved, step)
        control.wait_for_main()
        everyone = control.gather((found, moment))
        unreadable = [each for each in everyone if each[1] == _UNREADABLE]
        if unreadable:
            return unreadable[0]
        return next((difference for difference, _ in everyone if difference), None), everyone[0][1]

    def _repeated(self) -> set[str]:
        """The names of the handlers that see the repeated run."""
        handlers = self._trainer.registry.stateful()
        return {name for name, each in handlers.items() if not any(each is other for other in self._detached)}

    def _read(self, step: int, path: Location) -> Mapping[str, Any]:
        if self._saved[0] != step:
            self._saved = step, upgrade(load_checkpoint(path, in_pieces=_PARTS))
        return self._saved[1]


def final_line(run: Path) -> dict[int, Location]:
    """The run's checkpoints by their step, without those of attempts that a resume from an older one has abandoned."""
    line: dict[int, Location] = {}
    for path in reversed(find_checkpoints(run / "checkpoints")):  # from the last one written
        step = step_of(path)
        if step < min(line, default=step + 1):
            line[step] = path
    return line


def _moment_of(saved: Mapping[str, Any], step: int) -> str | None:
    """The event at which a Checkpointer saved this state; None if the state does not tell."""
    handlers = [each["state"] for each in saved["handlers"].values() if isinstance(each.get("state"), Mapping)]
    events = {each["saved_on"] for each in handlers if "saved_on" in each and each.get("saved_at") == step}
    if len(events) != 1:
        return None
    (event,) = events
    if event == Events.PREEMPTED.value:  # a rerun is not preempted: the state is that after the last event before it
        event = (Events.EPOCH_COMPLETED if saved["data"]["epoch_done"] else Events.ITERATION_COMPLETED).value
    return event if event in [each.value for each in _ENDS] else None


def _difference(saved: Mapping[str, Any], now: Mapping[str, Any], repeated: Collection[str]) -> str | None:
    """The first tensor that differs, of the parts that both have, and of the handlers with these names."""
    handlers = {name: each for name, each in saved["handlers"].items() if name in repeated}
    saved = {**saved, "handlers": handlers}
    now = {**now, "handlers": {name: now["handlers"][name] for name in handlers}}
    parts = (part for part in _PARTS if part in saved)  # an older format may lack one
    return next((each for part in parts for each in _differences(part, saved[part], now.get(part))), None)


def _of_layers(saved: Any, now: Any) -> Any:
    """What was saved of the layers that this process has."""
    if not isinstance(saved, Mapping) or not isinstance(now, Mapping):
        return saved
    return {key: _of_layers(each, now[key]) for key, each in saved.items() if key in now}


def _differences(name: str, saved: object, now: object) -> Iterator[str]:
    """The tensors that differ, in the order of the saved ones; then those that are only there now.

    Other values are not compared: a handler may keep measured times, paths and names of a run.
    """
    if isinstance(now, torch.Tensor) and now.is_meta:  # another process compares it
        return
    if is_shard(now):
        saved, now = local(sharded_like(saved, now)), local(now)
    elif isinstance(saved, StoredTensor):
        saved = saved.whole()
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in [*saved, *(key for key in now if key not in saved)]:
            yield from _differences(f"{name}.{key}", saved.get(key), now.get(key))
    elif isinstance(saved, list | tuple) and isinstance(now, list | tuple):
        if len(saved) != len(now) and (_holds_tensors(saved) or _holds_tensors(now)):
            yield f"{name} had {len(saved)} entries, and has {len(now)}"
            return
        for index, pair in enumerate(zip(saved, now, strict=False)):
            yield from _differences(f"{name}[{index}]", *pair)
    elif _holds_tensors(now) and not isinstance(saved, torch.Tensor):
        yield f"{name} holds a tensor, and had none"
    elif _holds_tensors(saved) and not isinstance(saved, torch.Tensor):
        yield f"{name} held a tensor, and has none"
    elif isinstance(saved, torch.Tensor):
        if not _is_array(now):
            yield f"{name} is missing"
            return
        mine, other = _host(saved), _host(now)
        if (mine.dtype, mine.shape) != (other.dtype, other.shape):
            yield f"{name} was {mine.dtype} {mine.shape}, and is {other.dtype} {other.shape}"
        elif mine.tobytes() != other.tobytes():
            count = int((mine.reshape(-1) != other.reshape(-1)).sum())
            yield f"{name}: {count or 'bits'} of {mine.size} values differ"


def _holds_tensors(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensors, value))
    return _is_array(value) and not isinstance(value, np.generic)  # a checkpoint holds numpy's scalars as numbers


def _is_array(value: object) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")


def _host(value: object) -> np.ndarray[Any, Any]:
    """The values as numpy's; of a type that numpy lacks, such as bfloat16, their bits."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        try:
            return np.asarray(value.numpy())
        except TypeError:
            return np.asarray(value.view(torch.int16 if value.itemsize == 2 else torch.int8).numpy())
    return np.asarray(value)
