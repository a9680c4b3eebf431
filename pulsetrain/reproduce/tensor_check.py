"""Compares the tensors of a run that is repeated with those of the checkpoints that the run has saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pulsetrain.engine import CheckpointError, Events, Phase
from pulsetrain.engine.checkpoint import Location, find_checkpoints, load_checkpoint
from pulsetrain.engine.checkpoint.reader import step_of
from pulsetrain.state.older_formats import upgrade
from pulsetrain.trainer import Trainer

__all__ = ["TensorCheck", "final_line"]

_PARTS = ("model", "modules", "optimizer", "strategy", "handlers")


class TensorCheck:
    """Compares tensors at the iteration of each checkpoint, bit for bit: weights, buffers, averages, the optimizer's.

    Those of handlers that the repeated run does not have are left out. A checkpoint may have been saved at the end of
    an iteration, of an epoch or of the run: one of these must agree.

    Args:
        trainer: it repeats the run.
        run: the run folder.
    """

    def __init__(self, trainer: Trainer, run: Path) -> None:
        self._trainer = trainer
        start = trainer.state.iteration
        self._expected = {step: path for step, path in final_line(run).items() if step > start}
        self._differences: dict[int, str] = {}  # by iteration, of those that have not agreed so far
        self.agreed: list[int] = []  # iterations
        for event in (Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED, Events.COMPLETED):
            trainer.add_event_handler(event, self._look, phase=Phase.PERSIST)

    @property
    def difference(self) -> str | None:
        """The first tensor that differs, with its checkpoint."""
        return next((self._differences[step] for step in sorted(self._differences)), None)

    def _look(self) -> None:
        step = self._trainer.state.iteration
        path = self._expected.get(step)
        if path is None:
            return
        try:
            saved = upgrade(load_checkpoint(path))
        except CheckpointError as error:  # nothing to compare with
            del self._expected[step]
            self._differences[step] = f"iteration {step}: {error}"
            return
        now = self._trainer.checkpoint_state()
        handlers = {name: each for name, each in saved["handlers"].items() if name in now["handlers"]}
        saved = {**saved, "handlers": handlers}
        difference = next(
            (each for part in _PARTS for each in _differences(part, saved.get(part), now.get(part))), None
        )
        if difference is None:
            del self._expected[step]
            self._differences.pop(step, None)
            self.agreed.append(step)
        else:
            self._differences[step] = f"iteration {step}, checkpoint {path.name}: {difference}"


def final_line(run: Path) -> dict[int, Location]:
    """The run's checkpoints by their step, without those of attempts that a resume from an older one has abandoned."""
    line: dict[int, Location] = {}
    for path in reversed(find_checkpoints(run / "checkpoints")):  # from the last one written
        step = step_of(path)
        if step < min(line, default=step + 1):
            line[step] = path
    return line


def _differences(name: str, saved: object, now: object) -> Iterator[str]:
    """The tensors that differ, in the order of the saved ones."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key, value in saved.items():
            yield from _differences(f"{name}.{key}", value, now.get(key))
    elif isinstance(saved, list | tuple) and isinstance(now, list | tuple) and len(saved) == len(now):
        for index, pair in enumerate(zip(saved, now, strict=True)):
            yield from _differences(f"{name}[{index}]", *pair)
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
