"""Writes every event of a bus into the run folder's log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from pulsetrain.engine import (
    FIRST,
    LAST,
    Engine,
    Event,
    EventBus,
    EventEnum,
    Events,
    OnError,
    Phase,
    TrainingResult,
    is_training_run,
)
from pulsetrain.engine.argument_checks import check_bool, check_choice, check_whole_number
from pulsetrain.engine.distributed.ranks import ranks
from pulsetrain.engine.events.names import EventType, identify
from pulsetrain.engine.recording import EventCheck, EventLog
from pulsetrain.engine.recording.log.places import ATTEMPT, count_after_end
from pulsetrain.engine.recording.log.stall import StallWatch
from pulsetrain.engine.training_run import total_iterations_of
from pulsetrain.handlers.attachment.attachment import Handler
from pulsetrain.handlers.attachment.engine_queries import outermost
from pulsetrain.handlers.metric_values.event_values import are_finite, are_numbers, summary
from pulsetrain.handlers.metric_values.step_values import learning_rates, scalars
from pulsetrain.handlers.recorder.continuation import Continuation, attempt_of
from pulsetrain.handlers.recorder.log_session import FETCHING, FINAL, MEASURED, LogSession
from pulsetrain.handlers.recorder.resume_check import ResumeCheck
from pulsetrain.handlers.run_files.ownership import FolderUse
from pulsetrain.handlers.run_files.run_file import note_start
from pulsetrain.handlers.run_files.run_folder import local_folder, make_folder

__all__ = ["EventRecorder"]

LEAST_BYTES = 100_000  # of a budget: a few blocks have to stay as they are
FREQUENT = (Events.ITERATION_STARTED, Events.GRADIENTS_READY, Events.OPTIMIZER_STEP_COMPLETED, *FETCHING)
_COMPLETED = Events.COMPLETED.value
_FINAL_TYPES = frozenset(event.value for event in FINAL)


class EventRecorder(Handler):
    """Writes the events of every engine on the bus into FOLDER/events, in the bus's order: read it with `EventLog`.

    Written events outlive the process, even if it is killed, with every value that was on the host. Scalars on a device
    are copied to the host together: by the first event after 200 ms, for 100 events at most, and at the end of each
    validation, rollout, epoch and run; a process that is killed loses those values, not the events. Non-finite floats
    are written as the strings "NaN", "Infinity" and "-Infinity"; a value that JSON cannot hold is summarised as
    {"__type__": ...}.

    Engines that join the bus later are recorded as well. Custom events that are registered later are recorded from the
    next STARTED or EPOCH_STARTED.

    A run that resumes from a checkpoint continues the log. Events that the log holds after the checkpoint are kept,
    marked as superseded, and compared with those that are computed again (`resume_check`), floats by their bits.

    Args:
        folder: the run folder; a resumed run continues the log in it.
        include_batches: record GET_BATCH_STARTED and GET_BATCH_COMPLETED as well; if several processes train together,
            these are always recorded, since they distinguish a process that loads from one that computes.
        every: record the events of only every n-th iteration and update; all other events are always recorded.
        max_bytes: budget of the sealed log, at least 100,000: when it is reached, only every hundredth of the old
            iterations keeps its events, and an event `log_thinned` says so.
        grad_norm: whether the gradients' norm is computed at each update, to be recorded with GRADIENTS_READY. False:
            the event is recorded if something else needs the norm, such as clipping or a guard. By default as in the
            run that is resumed, and False in a new run.
        rank: that of this process, if several train together: each writes a log. None: as torchrun or torch says.
        on_error: "warn" continues when the disk is full or gone, warns once, and writes the events when it can;
            "raise" ends the run.

    Raises:
        ConfigurationError: an argument is out of range.

    >>> import tempfile
    >>> from pulsetrain.engine.recording import EventLog
    >>> folder = tempfile.TemporaryDirectory()
    >>> engine = Engine(lambda engine, batch: {"loss": 1 / batch})
    >>> _ = EventRecorder(folder.name).attach(engine)
    >>> _ = engine.run([1, 2, 4])
    >>> [event.output for event in EventLog(folder.name).read(event="iteration_completed")]
    [{'loss': 1.0}, {'loss': 0.5}, {'loss': 0.25}]
    >>> folder.cleanup()
    """

    include_batches: bool
    grad_norm: bool | None
    rank: int
    max_bytes: int | None

    def __init__(
        self,
        folder: str | Path,
        include_batches: bool = False,
        every: int | None = None,
        *,
        grad_norm: bool | None = None,
        rank: int | None = None,
        max_bytes: int | None = None,
        on_error: OnError = "warn",
    ) -> None:
        if every is not None:
            check_whole_number("EventRecorder", "every", every)
        here = ranks()
        rank = here.rank if rank is None else rank
        check_whole_number("EventRecorder", "rank", rank, at_least=0)
        if max_bytes is not None:
            check_whole_number("EventRecorder", "max_bytes", max_bytes, LEAST_BYTES)
        check_choice("EventRecorder", "on_error", on_error, ("warn", "raise"))
        if grad_norm is not None:
            check_bool("EventRecorder", "grad_norm", grad_norm)
        self._is_shared = here.world_size > 1
        self.include_batches, self.grad_norm = include_batches or self._is_shared, grad_norm
        self.every = every
        self.rank, self.max_bytes = rank, max_bytes
        self._log = LogSession(local_folder("EventRecorder", folder) / "events", rank, max_bytes, on_error)
        self.continuation: Continuation = Continuation(self._log, rank, is_shared=self._is_shared)
        self._known: set[str] = set()  # keys of the events subscribed to
        self._in_epoch: set[str] = set()  # names of engines
        self._resumed_in_epoch: set[str] = set()  # engines whose epoch a checkpoint interrupted
        self._continues = False  # whether a run may continue without STARTED: attached during it, or interrupted
        self._outermost: Engine | None = None  # the engine whose run contains the runs of the others
        self._completed: tuple[str, int] | None = None  # the name of the one whose run has ended, and its iteration
        self._closed_at: dict[str, object] = {}  # this handler's state when the log was last closed
        self._measures = False  # whether this handler has gradients' norms computed
        self._stalls: StallWatch | None = None  # while the run is going

    @property
    def folder(self) -> Path:
        """The folder of the log; it may be changed until the first event is recorded."""
        return self._log.folder

    @folder.setter
    def folder(self, folder: Path) -> None:
        self._log.folder = folder

    def attach(self, engine_or_bus: Engine | EventBus) -> Self:
        """Record every engine of the bus, or of the engine's bus.

        Raises:
            RunFolderError: the folder cannot be written.
        """
        bus = engine_or_bus.bus if isinstance(engine_or_bus, Engine) else engine_or_bus
        with self._attachment.to(bus):
            self._log.bus = bus
            self._continues = any(each.is_running for each in bus.engines)
            make_folder("EventRecorder", self.folder)
            if not self.rank:
                FolderUse("EventRecorder", self._attachment, lambda: self.folder.parent, self._log.leave)
            for event in Events:
                if event not in FETCHING or self.include_batches:
                    self._subscribe(event)
                self._known.add(identify(event)[0])
            self._subscribe_to_custom_events()
            if self.grad_norm:
                self._measure()
        return self

    def detach(self) -> None:
        self._end()
        self._attachment.cancel()
        self._measures = False
        self._known.clear()
        self._log.forget()

    @property
    def resume_check(self) -> EventCheck | None:
        """Compares the run with what the log holds after the checkpoint that it resumed from."""
        return self._log.check

    @resume_check.setter
    def resume_check(self, check: EventCheck | None) -> None:
        self._log.check = check

    def note_missing_state(self, names: Iterable[str]) -> None:
        """The checkpoint that was loaded lacks this state: its resume is not called exact."""
        if isinstance(self.resume_check, ResumeCheck):
            self.resume_check.lacks = sorted(names)

    def flush(self) -> None:
        """Copy values from the device to the host and write them."""
        if self._log.writer is not None:
            self._log.settle()

    def files_to_sync(self) -> list[Path]:
        """The log's files: a checkpoint holds the place in the log, so the log has to be on disk before it."""
        return [*self._log.writer.files, self.folder] if self._log.writer is not None else []

    def state_dict(self) -> dict[str, object]:
        """The place in the log."""
        writer = self._log.writer
        if writer is None:
            return self._closed_at
        self._log.update()
        return {
            "seq": self._log.bus.sequence.last,
            "ord": writer.next_ord,
            "in_epoch": sorted(self._in_epoch),
            "run": writer.run,
            "seams": [list(seam) for seam in writer.seams],
            "grad_norm": self._measures,
            "shares": self.continuation.shares,
            "after_end": self._after_end(),
            "starts": [list(start) for start in self.continuation.starts],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """CHECKPOINT_LOADED, which follows, continues the log there."""
        self.continuation.saved = dict(state) or None
        if state:
            self._measure_as_before(state.get("grad_norm", True))  # version 0.1 always did

    def repeat(self, log: EventLog, *, resumed: bool = False) -> None:
        """The run in this log is repeated: measure what its recorder measured, and number the events in the same way.

        Args:
            log: of this rank.
            resumed: the run is repeated from a checkpoint, which is loaded next and says what was measured.
        """
        self.continuation.repeated = log
        first = None if resumed else next(log.read(event=Events.STARTED.value), None)
        if first is not None:
            self._measure_as_before((first.observed or {}).get("grad_norm", True))

    def begin_again(self) -> None:
        """The run in the log is repeated from its beginning: the events there are superseded when it starts."""
        self.continuation.begins_again = True

    def _subscribe(self, event: EventEnum) -> None:
        usual = self._on_event
        if event in MEASURED or event in FINAL:
            usual = self._on_opened
            self._attachment.subscribe(event, self._on_closed, phase=Phase.PERSIST, order=LAST)
        special: dict[EventType, Callable[[Engine, Event], None]] = {
            Events.EXCEPTION_RAISED: self._on_exception,
            Events.ITERATION_COMPLETED: self._on_iteration,
            Events.CHECKPOINT_LOADED: self._on_loaded,
            Events.STARTED: self._on_started,
            Events.EPOCH_STARTED: self._on_epoch_started,
            Events.METRICS_LOGGED: self._on_metrics,
        }
        sampled = self.every is not None and (event in FREQUENT or event is Events.ITERATION_COMPLETED)
        # FIRST: events that other receivers fire are recorded after this one
        chosen = event(every=self.every) if sampled else event
        passive = event is Events.GRADIENTS_READY  # recording causes no work: see `_measure`
        receive = special.get(event, usual)
        self._attachment.subscribe(chosen, receive, phase=Phase.COMPUTE, order=FIRST, passive=passive)
        if event is Events.STARTED or event is Events.EPOCH_STARTED:
            self._attachment.subscribe(event, self._subscribe_to_custom_events, phase=Phase.COMPUTE, order=FIRST)

    def _measure(self) -> None:
        """Have the gradients' norm computed, by a subscription that is not passive."""
        if self._attachment.bus is not None and not self._measures:
            self._measures = True
            wanted = Events.GRADIENTS_READY if self.every is None else Events.GRADIENTS_READY(every=self.every)
            self._attachment.subscribe(wanted, lambda: None)

    def _measure_as_before(self, measured: bool) -> None:
        if measured and self.grad_norm is None:
            self._measure()

    def _subscribe_to_custom_events(self) -> None:
        bus = self._attachment.bus
        for engine in bus.engines if bus is not None else ():
            for event in engine.registered_events:
                key, _ = identify(event)
                if key not in self._known:
                    self._known.add(key)
                    self._subscribe(event)

    def _on_event(self, engine: Engine, event: Event) -> None:
        if not self._log.record(event):
            self._log.write(self._log.entry(event))

    def _on_metrics(self, engine: Engine, event: Event) -> None:
        tokens = getattr(engine.state, "tokens", 0)
        if not tokens:
            self._on_event(engine, event)
            return
        logged = self._log.entry(event)
        logged.observed = {**(logged.observed or {}), "tokens": tokens}  # of the run so far
        self._log.write(logged)

    def _on_iteration(self, engine: Engine, event: Event) -> None:
        log, result = self._log, engine.state.output
        if self._outermost is None:
            self._adopt(engine)
        named = result.metrics if type(result) is TrainingResult else result
        rates = engine.learning_rates if is_training_run(engine) else learning_rates(engine)
        is_plain = type(named) is dict and named and are_numbers(named) and are_finite(rates)
        if is_plain and log.record(event, named, tuple(rates) or None):
            return
        logged = log.entry(event)
        try:
            output = scalars(engine.state.output)
            if output:
                logged.output = log.values.of_scalars(output)
        except Exception:  # the user's object may raise anything; the run continues
            logged.output = summary(engine.state.output)
        if rates:
            log.values.put(logged, "lr", list(rates))
        log.write(logged)

    def _on_started(self, engine: Engine, event: Event) -> None:
        log = self._log
        if self._outermost is None:
            # of a recorder attached during a run, the first STARTED may be that of an engine inside it
            self._outermost = outermost(engine)
        if self._is_main(engine):
            self._completed = None
        if self._outermost is engine:
            self.continuation.start(engine, event)
            log.on_disk(note_start, self.folder.parent, engine, event.iteration, self.rank, log.open().run)
            self._watch_stalls()
        logged = log.entry(event)
        logged.observed = {**_bounds(engine), "grad_norm": self._measures}
        if self.rank and (attempt := attempt_of(engine)):  # to know later at which starts this rank was there
            logged.observed[ATTEMPT] = attempt
        log.write(logged)

    def _adopt(self, engine: Engine) -> None:
        """The engine's run continues: its log is closed at its end, as if it had STARTED here."""
        if self._outermost is None and engine.is_running:
            self._outermost = outermost(engine)
            self._log.open()
            self._watch_stalls()

    def _watch_stalls(self) -> None:
        if self._stalls is None:
            log = self._log
            self._stalls = StallWatch(log.folder, self.rank, lambda: log.bus.sequence.last)

    def _on_epoch_started(self, engine: Engine, event: Event) -> None:
        self._adopt(engine)
        logged = self._log.entry(event, observed=event.engine in self._resumed_in_epoch)
        self._resumed_in_epoch.discard(event.engine)
        self._in_epoch.add(event.engine)
        logged.observed = _bounds(engine) or None
        self._log.write(logged)

    def _on_loaded(self, engine: Engine, event: Event) -> None:
        self._completed = None
        in_epoch = self.continuation.resume(engine, event)
        if in_epoch is not None:
            self._in_epoch, self._resumed_in_epoch = in_epoch, set(in_epoch)
        self._log.write(self._log.entry(event))

    def _on_opened(self, engine: Engine, event: Event) -> None:
        if event.type == Events.EPOCH_COMPLETED.value:
            self._in_epoch.discard(event.engine)
        if event.type in _FINAL_TYPES:
            self._adopt(engine)
        if event.type == _COMPLETED and self._is_main(engine):
            self._completed = event.engine, event.iteration
        self._log.begin(self._log.entry(event), event, engine)

    def _on_closed(self, engine: Engine, event: Event) -> None:
        if not self._log.finish(event.seq) or engine is not self._outermost or event.type not in _FINAL_TYPES:
            return
        if event.type != Events.TERMINATE.value or engine.should_terminate is not True:  # else COMPLETED follows
            self._end()
            self._continues = event.type == Events.INTERRUPT.value

    def _on_exception(self, engine: Engine, event: Event) -> None:
        if self._log.writer is None and not self._continues:
            return  # the run was refused before it began
        self._adopt(engine)
        self._log.fail(engine, event.payload.error)
        self._log.write(self._log.entry(event))
        if engine is self._outermost:
            self._end()

    def _end(self) -> None:
        """The outermost run is over: close the log."""
        self._outermost = None
        if self._stalls is not None:
            self._stalls.stop()
            self._stalls = None
        if self._log.writer is not None:
            self._closed_at = self.state_dict()
            self._log.close()
        if self.resume_check is not None:
            self.resume_check.close()

    def _is_main(self, engine: Engine) -> bool:
        """Whether this is the first engine of the bus: a trainer, and not its evaluator."""
        return next(iter(self._log.bus.engines), None) is engine

    def _after_end(self) -> int | None:
        """See `place_after`."""
        return None if self._completed is None else count_after_end(self._log.read(), *self._completed)


def _bounds(engine: Engine) -> dict[str, int]:
    """The length of the run, as far as it is known; a replay reads it from the log."""
    state = engine.state
    known = {name: getattr(state, name, None) for name in ("max_epochs", "max_iters", "epoch_length")}
    known["total_iterations"] = total_iterations_of(engine)
    return {name: value for name, value in known.items() if isinstance(value, int)}
