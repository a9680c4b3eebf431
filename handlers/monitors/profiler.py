"""Profiles some iterations of a run with torch.profiler."""

from __future__ import annotations

import os
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import torch
from torch.autograd.profiler import record_function
from torch.profiler import profile

from pulsetrain.engine import ConfigurationError, Engine, Event, Events
from pulsetrain.engine.argument_checks import check_bool, check_whole_number
from pulsetrain.engine.logs import get_logger
from pulsetrain.handlers.attachment.attachment import Attachment, Handler, subscribe_first, subscribe_last
from pulsetrain.handlers.attachment.engine_queries import reject_replay
from pulsetrain.handlers.run_files.ownership import FolderUse
from pulsetrain.handlers.run_files.run_folder import local_folder, make_folder

__all__ = ["Profiler"]


class Profiler(Handler):
    """Writes a trace of a window of iterations to FOLDER/profile/trace-ITERATION.json, once for each run() call.

    chrome://tracing and ui.perfetto.dev show the trace. Each iteration in it is marked "iteration N", and the wait for
    its batch "batch N". If a run ends inside the window, the trace has the iterations up to there.

    Args:
        folder: the run folder.
        start: the window's first iteration, counted from 1 where the run starts or resumes.
        iterations: how many.
        warmup: iterations before the window that are profiled and discarded, since profiling is slower at first.
        memory: also record what each operation allocates.
        stacks: also record the Python lines that called operations; this is slower, and traces are larger.

    Raises:
        ConfigurationError: a number is out of range, or the warm-up would start before the run.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     engine = Engine(lambda engine, batch: torch.ones(2) * batch)
    ...     profiler = Profiler(folder, start=2, iterations=1, warmup=0).attach(engine)
    ...     state = engine.run([1, 2, 3])
    ...     [path.name for path in (Path(folder) / "profile").iterdir()]
    ['trace-2.json']
    """

    start: int
    iterations: int
    warmup: int
    memory: bool
    stacks: bool

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
            rule = f"the warm-up would start before the run; use start={warmup + 1} or more"
            raise ConfigurationError(rule, "Profiler", start=start, warmup=warmup)
        self.folder: Path = local_folder("Profiler", folder)
        self.start, self.iterations, self.warmup = start, iterations, warmup
        self.memory, self.stacks = memory, stacks
        self._begun_at: int | None = None  # iterations done when the run started; None if nothing is left to profile
        self._profile: profile | None = None
        self._mark_of = ExitStack()  # the batch or the iteration in progress
        self._window = Attachment("Profiler")  # until the window ends

    def attach(self, engine: Engine) -> Self:
        """Profile this engine's next run.

        Raises:
            RunFolderError: the folder cannot be written.
            RecordingError: the engine is a replay.
        """
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            reject_replay("Profiler", engine, "process that trains")
            make_folder("Profiler", self.folder / "profile")
            FolderUse("Profiler", subscribe, lambda: self.folder)
            subscribe_last(subscribe, Events.STARTED, self._on_started)
            subscribe_first(subscribe, Events.TERMINATE | Events.COMPLETED | Events.EXCEPTION_RAISED, self._on_end)
        return self

    def detach(self) -> None:
        """Stop profiling; a window in progress is discarded."""
        super().detach()
        self._window.cancel()
        self._unmark()
        self._begun_at = None
        if self._profile is not None:
            profiled, self._profile = self._profile, None
            profiled.stop()

    def _on_started(self, engine: Engine) -> None:
        self._finish(engine)  # of a run that was abandoned
        self._begun_at = engine.state.iteration
        with self._window.to(engine, whole_bus=False) as subscribe:
            subscribe_last(subscribe, Events.GET_BATCH_STARTED, self._on_asking)
            subscribe_first(subscribe, Events.GET_BATCH_COMPLETED, self._unmark)
            subscribe_last(subscribe, Events.ITERATION_STARTED, self._on_step_begins)
            subscribe_first(subscribe, Events.ITERATION_COMPLETED, self._unmark)
            subscribe_last(subscribe, Events.ITERATION_COMPLETED, self._move)
        self._move(engine)

    def _on_asking(self, engine: Engine) -> None:
        self._mark(f"batch {engine.state.iteration + 1}")

    def _on_step_begins(self, engine: Engine) -> None:
        self._mark(f"iteration {engine.state.iteration}")

    def _move(self, engine: Engine) -> None:
        """After an iteration, or before the first: start, advance or end."""
        if self._begun_at is None:
            return
        done = engine.state.iteration - self._begun_at
        if done == self.start - self.warmup - 1:
            self._begin()
        elif self._profile is not None and done == self.start - 1 + self.iterations:
            self._finish(engine)
        elif self._profile is not None:
            self._profile.step()

    def _begin(self) -> None:
        # a second profiler would abort the process, and torch has no public way to ask
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            self._begun_at = None
            self._window.cancel()
            raise RuntimeError("Profiler: another profiler is active in this process; nothing is written")
        window = None
        if self.warmup:  # otherwise torch would warn about the missing warm-up
            window = torch.profiler.schedule(wait=0, warmup=self.warmup, active=self.iterations, repeat=1)
        profiled = profile(schedule=window, profile_memory=self.memory, with_stack=self.stacks, acc_events=True)
        profiled.start()
        self._profile = profiled

    def _on_end(self, engine: Engine, event: Event) -> None:
        self._finish(engine)

    def _finish(self, engine: Engine) -> None:
        """Write the window as far as it got, and unsubscribe from the iterations."""
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
                "the run ended before the window to profile; nothing was written",
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
            self._mark_of.enter_context(record_function(name))

    def _unmark(self) -> None:
        self._mark_of.close()
