"""Names the state that no checkpoint holds: at the start what can never be restored, at each save what has changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from inspect import get_annotations

from pulsetrain.engine import LAST, Engine, Events, Phase, TrainingRun, is_training_run
from pulsetrain.engine.checkpoint.plain import plain
from pulsetrain.engine.distributed.saved_shards import held
from pulsetrain.engine.logs import get_logger
from pulsetrain.handlers import Checkpointer, EventRecorder
from pulsetrain.state.data_cursor import DataCursor
from pulsetrain.state.fingerprint import Fingerprint
from pulsetrain.state.handler_registry import HandlerRegistry, state_of
from pulsetrain.state.loader_parts import parts_of_loader
from pulsetrain.state.object_graph import is_users, package_of
from pulsetrain.state.part import StateDict, keeps_state, require
from pulsetrain.state.run_fingerprint import fingerprint_of_run
from pulsetrain.state.start_checks import check_data, check_half
from pulsetrain.state.validation_sets import states_of_sets

__all__ = ["UnsavedState"]

_METHODS = ("state_dict", "load_state_dict")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OWN = ("pulsetrain", "ignite")
_WHAT_TO_DO = (
    "keep numbers and tensors in a buffer, in get_extra_state() or in state_dict() and load_state_dict(); add modules, "
    "parameter groups and hooks before train(resume=...)"
)


class UnsavedState:
    """Names what a resumed run would not find as it was: a part of the run's state.

    At the start, a fingerprint is taken of the attributes of the model, the loss, the strategy, the optimizer, the
    data, and of handlers without a state; and again for each checkpoint, which holds the names of those that have
    changed. They are reported once when it is saved, and when a run resumes from it. It does so only if the run has a
    Checkpointer.

    Args:
        registry: the handlers and other subscribers.
        data: refuses a loader's state that cannot be saved, when its first pass begins.
        users: the names of attributes that a subclass of the run's class has set before the run was made.
        variables: those of a loop written by hand that keep state, by name.
    """

    def __init__(
        self,
        registry: HandlerRegistry,
        data: DataCursor,
        users: Collection[str] = (),
        variables: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        self._registry, self._data, self._users, self._variables = registry, data, frozenset(users), variables
        self._saves = False
        self.reset()

    def attach(self, engine: Engine) -> None:
        assert is_training_run(engine)
        self._run: TrainingRun = engine
        self._own: set[str] = _names_of(engine) - self._users  # handlers, which are attached later, may set others
        engine.add_event_handler(Events.STARTED, self._check, phase=Phase.COMPUTE)
        # handlers of STARTED may still prepare the model
        engine.bus.subscribe(Events.STARTED, self._begin, sender=engine, phase=Phase.PERSIST, order=LAST)
        # each validation set resets the metrics in the phase COMPUTE
        engine.evaluator.add_event_handler(Events.EPOCH_STARTED, self._look_at_metrics, phase=Phase.PERSIST)
        engine.add_event_handler(Events.CHECKPOINT_SAVED, self._report, phase=Phase.OBSERVE)
        # recorders have begun their comparison then
        engine.bus.subscribe(
            Events.CHECKPOINT_LOADED, self._note_in_recorders, sender=engine, phase=Phase.PERSIST, order=LAST
        )

    def reset(self) -> None:
        self._start: Fingerprint | None = None
        self._metrics: Fingerprint | None = None
        self._changed: set[str] = set()  # since the run began, in this process or an earlier one
        self._reported: set[str] = set()

    def state_dict(self) -> dict[str, list[str]]:
        """What has changed since the run began, and which attributes are too deep or too large to be seen whole."""
        unseen: set[str] = set()
        if self._start is not None:
            self._changed.update(self._data.changed_in_workers())
            now = self._look()
            if now is not None:
                self._changed.update(now.changed_since(self._start))
                unseen = now.unseen
        return {"changed": sorted(self._changed), "not_seen": sorted(unseen)}

    def check_state_dict(self, state: StateDict) -> None:
        require("unsaved", state, ("changed", "not_seen"))

    def load_state_dict(self, state: StateDict) -> None:
        """Report what the checkpoint lacks."""
        self.reset()
        self._changed.update(state["changed"])
        self._reported.update(state["changed"])
        if state["changed"]:
            get_logger("pulsetrain").warning(
                "the checkpoint lacks state that had changed when it was made: the resumed run starts with its first "
                "values, and may differ from one that was not interrupted; " + _WHAT_TO_DO,
                attributes=list(state["changed"]),
            )

    def _note_in_recorders(self) -> None:
        for handler in self._registry.subscribers() if self._changed else ():
            if isinstance(handler, EventRecorder):
                handler.note_missing_state(self._changed)

    def _begin(self) -> None:
        if self._saves and self._start is None:
            self._start = self._look()

    def _look(self) -> Fingerprint | None:
        """The fingerprint; None, with a warning, if code of the user's raises where that is not expected."""
        try:
            return fingerprint_of_run(self._run, self._registry, self._own, self._variables())
        except Exception as error:
            get_logger("pulsetrain").warning(
                "state that is in no checkpoint cannot be compared: what changes during the run is not reported",
                error=f"{type(error).__name__}: {error}",
            )
            return None

    def _report(self) -> None:
        """Warn about what has changed since the run began and is not in the checkpoint that was just written."""
        new = sorted(self._changed - self._reported)
        self._reported.update(new)  # once
        if new:
            get_logger("pulsetrain").warning(
                "attributes change during the run and are in no checkpoint: a resumed run starts with their first "
                "values; " + _WHAT_TO_DO,
                attributes=new,
            )

    def _check(self) -> None:
        """Warn, and refuse states that could not be loaded again.

        Raises:
            CheckpointError: a state holds what could not be loaded again; the message says whose and where.
        """
        subscribers = self._registry.subscribers()
        self._registry.settings()  # of those that were attached since, as they are now
        saves = self._saves = any(isinstance(handler, Checkpointer) for handler in subscribers)
        self._data.refuses_unsavable = saves
        if not saves:
            return
        run = self._run
        known = [each for _, each in parts_of_loader(run.train_loader)]
        check_data("the training data", run.train_loader)
        for name, loader in run.val_loaders.items():
            check_data(f"the validation set {name!r}", loader, known)
        for handler in subscribers:
            if package_of(handler) != "pulsetrain":
                check_half(handler, "a handler")
        check_half(run.strategy, "the strategy")
        # one at a time: a check may copy numpy's arrays
        for name, part in (("model", run.model), ("optimizer", run.optimizer), ("strategy", run.strategy)):
            if keeps_state(part):
                plain({name: held(state_of(name, part))})
        plain({"validation": {"sets": states_of_sets(run.val_loaders, run.train_loader)}})
        for key, handler in self._registry.stateful().items():
            if package_of(handler) != "pulsetrain":
                plain({"handlers": {key: {"state": held(state_of(key, handler))}}})

    def _look_at_metrics(self) -> None:
        """What the user's metrics still hold when a validation has reset them."""
        if self._start is None:
            return
        found = Fingerprint()
        given = {id(metric): name for name, metric in self._run.val_metrics.items()}
        for metric in self._registry.metrics():
            name = given.get(id(metric), type(metric).__name__)
            if is_users(metric) and package_of(metric) != "torchmetrics":
                found.add_attributes(f"metric {name}", metric)
        if self._metrics is None:
            self._metrics = found
        self._changed.update(found.changed_since(self._metrics))


def _names_of(engine: Engine) -> set[str]:
    """The attributes that it has, and those that its classes here declare or have as defaults."""
    own = [kind for kind in type(engine).__mro__ if kind.__module__.partition(".")[0] in _OWN]
    return {*vars(engine), *(name for kind in own for name in (*vars(kind), *get_annotations(kind)))}
