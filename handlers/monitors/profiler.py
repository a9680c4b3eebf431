"""Profiles some iterations of a run with torch.profiler."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from pulsetrain.engine.argument_checks import check_bool, check_whole_number
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import Event, Events
from pulsetrain.engine.events.subscription import FIRST, LAST, Phase
from pulsetrain.engine.logs import get_logger
from pulsetrain.handlers.attachment.attachment import Attachment
from pulsetrain.handlers.attachment.engine_queries import reject_replay
from pulsetrain.handlers.run_files.run_folder import make_folder

__all__ = ["Profiler"]


class Profiler:
    """Writes what a window of iterations does to FOLDER/profile/trace-ITERATION.json, once for each run() call.

    It is a trace as chrome://tracing and ui.perfetto.dev read it. Each iteration in it is marked "iteration N", and the
    wait for its batch "batch N". A run that ends inside the window has what there was of it in the trace.

    Args:
        folder: the run folder.
        start: the window's first iteration, counted from 1 where the run begins or goes on.
        iterations: how many.
        warmup: iterations before the window that are profiled as well and left out: at first that makes them slower.
        memory: what each operation allocates, too.
        stacks: the lines of Python from which operations were called, too; slower, and larger.

    Raises:
        ConfigurationError: a number out of range, or the warm-up would begin before the run does.
    """

    def __init__(
        self,
        folder: str | Path,
        start: int = 10,
        iterations: int = 5,
        warmup: int = 2,
        *,
        memory: bool = False,
        stacks: bool = False,
    ) -> None:
        check_whole_number("Profiler", "start", start)
        check_whole_number("Profiler", "iterations", iterations)
        check_whole_number("Profiler", "warmup", warmup, at_least=0)
        check_bool("Profiler", "memory", memory)
        check_bool("Profiler", "stacks", stacks)
        if warmup >= start:
            raise ConfigurationError(
                f"Profiler(start={start}, warmup={warmup}): the warm-up would begin before the run does; "
                f"use start={warmup + 1} or more"
            )
        self.folder = Path(folder)
        self.start, self.iterations, self.warmup = start, iterations, warmup
        self.memory, self.stacks = memory, stacks
        self._begun_at: int | None = None  # iterations behind us when the run began; None: nothing left to profile
        self._profile: Any = None
        self._marks: list[Any] = []
        self._attachment = Attachment("Profiler")
        self._window = Attachment("Profiler")  # up to its end

    def attach(self, engine: Engine) -> Self:
        """Profile this engine's next run.

        Raises:
            RunFolderError: the folder cannot be written.
            RecordingError: the engine is a replay.
        """
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            reject_replay("Profiler", engine, "process that trains")
            make_folder("Profiler", self.folder / "profile")
            _last(subscribe, Events.STARTED, self._on_started)
            _first(subscribe, Events.TERMINATE | Events.COMPLETED, self._on_end)
            _first(subscribe, Events.EXCEPTION_RAISED, self._on_failure)
        return self

    def detach(self) -> None:
        """Profile no more; a window under way is given up."""
        self._attachment.cancel()
        self._window.cancel()
        self._unmark()
        self._begun_at = None
        if self._profile is not None:
            profiled, self._profile = self._profile, None
            profiled.stop()

    def _on_started(self, engine: Engine) -> None:
        self._on_end(engine)  # of a run that was given up
        self._begun_at = engine.state.iteration
        with self._window.to(engine, whole_bus=False) as subscribe:
            _last(subscribe, Events.GET_BATCH_STARTED, self._on_asking)
            _first(subscribe, Events.GET_BATCH_COMPLETED, self._unmark)
            _last(subscribe, Events.ITERATION_STARTED, self._on_step_begins)
            _first(subscribe, Events.ITERATION_COMPLETED, self._unmark)
            _last(subscribe, Events.ITERATION_COMPLETED, self._on_iteration)
        self._move(engine)

    def _on_asking(self, engine: Engine) -> None:
        self._mark(f"batch {engine.state.iteration + 1}")

    def _on_step_begins(self, engine: Engine) -> None:
        self._mark(f"iteration {engine.state.iteration}")

    def _on_iteration(self, engine: Engine) -> None:
        if self._begun_at is not None:
            self._move(engine)

    def _move(self, engine: Engine) -> None:
        """Behind an iteration, or before the first: begin, move on or end."""
        assert self._begun_at is not None
        behind = engine.state.iteration - self._begun_at
        if behind == self.start - self.warmup - 1:
            self._begin()
        elif self._profile is not None and behind == self.start - 1 + self.iterations:
            self._on_end(engine)
        elif self._profile is not None:
            self._profile.step()

    def _begin(self) -> None:
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # a second one ends the process
            self._begun_at = None
            self._window.cancel()
            raise RuntimeError("Profiler: another profiler is at work in this process; nothing is written")
        kinds = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(ProfilerActivity.CUDA)
        if torch.xpu.is_available():
            kinds.append(ProfilerActivity.XPU)
        window = None
        if self.warmup:  # else it would warn of what was asked for
            window = torch.profiler.schedule(wait=0, warmup=self.warmup, active=self.iterations, repeat=1)
        profiled = profile(
            activities=kinds,
            schedule=window,
            profile_memory=self.memory,
            with_stack=self.stacks,
            acc_events=True,
        )
        profiled.start()
        self._profile = profiled

    def _on_failure(self, engine: Engine, event: Event) -> None:
        self._on_end(engine)

    def _on_end(self, engine: Engine) -> None:
        """Write what there is of the window, and hear no more of the iterations."""
        self._window.cancel()
        self._unmark()
        profiled, self._profile = self._profile, None
        if profiled is None:
            return
        assert self._begun_at is not None
        first, self._begun_at = self._begun_at + self.start, None
        profiled.stop()
        if engine.state.iteration < first:
            get_logger("handlers").warning(
                "the run ended before the window that was to be profiled; nothing was written",
                window=f"iterations {first} to {first + self.iterations - 1}",
                ended=engine.state.iteration,
            )
            return
        path = self.folder / "profile" / f"trace-{first}.json"
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.json")
        try:
            profiled.export_chrome_trace(str(temporary))
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _mark(self, name: str) -> None:
        if self._profile is not None:
            self._unmark()
            mark = record_function(name)
            mark.__enter__()
            self._marks.append(mark)

    def _unmark(self) -> None:
        while self._marks:
            self._marks.pop().__exit__(None, None, None)


def _first(subscribe: Callable[..., None], event: Any, handler: Any) -> None:
    subscribe(event, handler, phase=Phase.COMPUTE, on_error="warn", order=FIRST)


def _last(subscribe: Callable[..., None], event: Any, handler: Any) -> None:
    subscribe(event, handler, phase=Phase.PERSIST, on_error="warn", order=LAST)
