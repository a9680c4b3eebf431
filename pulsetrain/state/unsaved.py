"""Names the state that no checkpoint holds: at the start what can never be restored, at each save what has changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from inspect import get_annotations
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pulsetrain.engine import LAST, Engine, Events, Phase, TrainingRun, is_training_run
from pulsetrain.engine.checkpoint.plain import plain
from pulsetrain.engine.data.loaders import can_be_read_once
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.optimizers import parts_of
from pulsetrain.handlers import Checkpointer
from pulsetrain.state.data_cursor import DataCursor
from pulsetrain.state.fingerprint import Fingerprint, attributes_of_module, is_plain, values_of_class, variables_of
from pulsetrain.state.handler_registry import HandlerRegistry, state_of
from pulsetrain.state.loader_parts import parts_of_loader
from pulsetrain.state.module_state import DROPOUTS, modules_in
from pulsetrain.state.object_graph import generators_in, is_of_project, is_users, of_process, package_of
from pulsetrain.state.part import StateDict, keeps_state, require
from pulsetrain.state.run_state import Counters
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

    def _begin(self) -> None:
        if self._saves and self._start is None:
            self._start = self._look()

    def _look(self) -> Fingerprint | None:
        """The fingerprint; None, with a warning, if code of the user's raises where that is not expected."""
        try:
            return self._fingerprint()
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
        _check_data("the training data", run.train_loader)
        for name, loader in run.val_loaders.items():
            _check_data(f"the validation set {name!r}", loader, known)
        for handler in subscribers:
            if package_of(handler) != "pulsetrain":
                _check_half(handler, "a handler")
        _check_half(run.strategy, "the strategy")
        # one at a time: a check may copy numpy's arrays
        for name, part in (("model", run.model), ("optimizer", run.optimizer), ("strategy", run.strategy)):
            if keeps_state(part):
                plain({name: state_of(name, part)})
        plain({"validation": {"sets": states_of_sets(run.val_loaders, run.train_loader)}})
        for key, handler in self._registry.stateful().items():
            if package_of(handler) != "pulsetrain":
                plain({"handlers": {key: {"state": state_of(key, handler)}}})

    def _fingerprint(self) -> Fingerprint:
        """Of everything that the next iteration may depend on and that no other part saves."""
        run, registry = self._run, self._registry
        modules = dict(_modules(run.model, run.strategy))
        loaders = _loaders_of(run)
        known: list[object] = [run, run.strategy, run.optimizer, run.backend]
        known += [each for _, loader, parts in loaders for each in (loader, *parts.values())]
        known += [*registry.saved(), *modules.values(), *parts_of(run.optimizer).values()]
        known += run.val_metrics.values()
        tensors = [each for module in modules.values() for each in _tensors(module)]
        found = Fingerprint([*known, *tensors, *of_process()])
        for path, module in modules.items():
            _add_module(found, path, module)
        if not keeps_state(run.strategy):
            found.add_attributes("strategy", run.strategy)
        for name, part in parts_of(run.optimizer).items():
            path = f"optimizer.{name}" if name else "optimizer"
            if type(part).state_dict is torch.optim.Optimizer.state_dict:
                found.add_attributes(path, part)
            _add_hooks(found, path, [each for name in _OPTIMIZER_HOOKS for each in vars(part).get(name, {}).values()])
            others = [each for group in part.param_groups for each in list.__iter__(group["params"])]
            own = set(map(id, tensors))
            found.add(
                f"{path}: parameters that are not the model's", [id(each) for each in others if id(each) not in own]
            )
        engine = registry.engine
        saved = {
            *_state_of_engines(),
            *Counters.NAMES,
            *(engine.counter_of(event) for event in engine.registered_events),
        }
        state = {name: value for name, value in vars(engine.state).items() if name not in saved}
        found.add_attributes("state", SimpleNamespace(**state))
        for name, value in {**values_of_class(type(run)), **vars(run)}.items():
            if name not in self._own:
                found.add(f"trainer.{name}", value)
        found.reads_generators = False  # of the data, they are reported at the start
        for prefix, loader, parts in loaders:
            _add_loader(found, prefix, loader, parts)
        found.reads_generators = True
        self._add_subscribers(found)
        for name, held in self._variables().items():
            found.add(f"variable {name} of the loop", held)
        return found

    def _look_at_metrics(self) -> None:
        """What the user's metrics still hold when a validation has reset them."""
        if self._start is None:
            return
        found = Fingerprint()
        for name, metric in self._run.val_metrics.items():
            if is_users(metric) and package_of(metric) != "torchmetrics":
                found.add_attributes(f"metric {name}", metric)
        if self._metrics is None:
            self._metrics = found
        self._changed.update(found.changed_since(self._metrics))

    def _add_subscribers(self, found: Fingerprint) -> None:
        """What the user's handlers, functions and filters hold, and which there are."""
        registry = self._registry
        for handler in registry.subscribers():
            if is_users(handler):
                path = f"handler {type(handler).__name__}"
                if not keeps_state(handler):
                    found.add_attributes(path, handler)
                _add_variables(found, path, type(handler))
        counts: Counter[str] = Counter()
        for subscription in [*registry.subscriptions(), *registry.subscriptions(self._run.evaluator)]:
            path = f"handler {subscription.description}"
            if is_users(subscription.filter):
                found.add_attributes(f"{path}: filter", subscription.filter)
            if not is_users(subscription.handler):
                continue
            counts[path] += 1
            found.hashes[path] = counts[path]
            if isinstance(subscription.handler, (FunctionType, partial)):
                found.add_attributes(path, subscription.handler)
                found.add(f"{path}: arguments", [*subscription.args, *subscription.kwargs.values()])


def _loaders_of(run: TrainingRun) -> list[tuple[str, object, dict[str, object]]]:
    """The loaders of the training and validation data with a prefix of their paths, and the parts, each once."""
    found: list[tuple[str, object, dict[str, object]]] = []
    seen = set[int]()
    for prefix, loader in (
        ("", run.train_loader),
        *((f"val_loader {name}.", each) for name, each in run.val_loaders.items()),
    ):
        parts = {path: part for path, part in parts_of_loader(loader) if id(part) not in seen}
        if id(loader) not in seen:
            found.append((prefix, loader, parts))
        seen.update(map(id, (loader, *parts.values())))
    return found


def _add_loader(found: Fingerprint, prefix: str, loader: object, parts: dict[str, object]) -> None:
    """What the parts of a loader hold, unless they save it."""
    if not isinstance(loader, (DataLoader, list, tuple)):
        parts = {**parts, "loader": loader}
    for path, each in parts.items():
        if isinstance(each, (list, tuple, dict)):
            found.add_items(prefix + path, each)
        elif (
            not keeps_state(each)
            or (isinstance(each, IterableDataset) and not keeps_state(loader))
            or (each is loader and prefix)  # whose state is not saved
        ):
            found.add_attributes(prefix + path, each, _numbers_of(path, each))


def _names_of(engine: Engine) -> set[str]:
    """The attributes that it has, and those that its classes here declare or have as defaults."""
    own = [kind for kind in type(engine).__mro__ if kind.__module__.partition(".")[0] in _OWN]
    return {*vars(engine), *(name for kind in own for name in (*vars(kind), *get_annotations(kind)))}


def _numbers_of(path: str, part: object) -> tuple[str, ...]:
    """The attributes of a sampler that `set_epoch` sets before each pass."""
    samples = path.startswith(("sampler", "batch_sampler")) and not isinstance(part, Dataset)
    return ("epoch", "_epoch") if samples and hasattr(type(part), "set_epoch") else ()


def _modules(model: nn.Module, strategy: object) -> Iterator[tuple[str, nn.Module]]:
    """The modules of the model and the strategy with all their submodules, each once, by their paths."""
    seen: set[nn.Module] = set()
    for root, holder in (("model", model), *modules_in(strategy)):
        for path, module in holder.named_modules(memo=seen):
            yield f"{root}.{path}".rstrip("."), module


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers of one module, without reading them: that takes time where they show values."""
    held = vars(module)
    for tensor in (*held["_parameters"].values(), *held["_buffers"].values()):
        if tensor is not None:
            yield tensor


def _add_module(found: Fingerprint, path: str, module: nn.Module) -> None:
    """What no state_dict of the module has: its plain attributes, which parts it has, and its hooks."""
    kind, held = type(module), vars(module)
    passing = held["_non_persistent_buffers_set"]
    names = [
        (name, type(each)) for kept in ("_parameters", "_buffers", "_modules")
        for name, each in held[kept].items() if each is not None and name not in passing
    ]  # fmt: skip
    found.hashes[f"{path}: parameters, buffers and modules"] = hash(tuple(names))
    hooks = [hook for name in _HOOKS for hook in held[name].values()]
    for tensor in _tensors(module):
        for kept in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks += (getattr(tensor, kept, None) or {}).values()
    _add_hooks(found, path, hooks)
    for name, tensor in held["_parameters"].items():
        attributes = vars(tensor) if tensor is not None else {}
        attributes = {key: each for key, each in attributes.items() if not key.startswith("_dynamo")}  # torch.compile
        if attributes:
            found.add_items(f"{path}.{name}: attributes", attributes)
    if kind.get_extra_state is not nn.Module.get_extra_state or kind.state_dict is not nn.Module.state_dict:
        return
    for name, value in attributes_of_module(module):
        if name != "p" or not isinstance(module, DROPOUTS):  # which is saved
            found.add(f"{path}.{name}", value)


def _add_hooks(found: Fingerprint, path: str, hooks: list[Any]) -> None:
    """Which hooks there are, and what those of the user hold."""
    names = [getattr(each, "__qualname__", type(each)) for each in hooks if package_of(each) not in _OWN]
    found.hashes[f"{path}: hooks"] = hash(tuple(names))
    for number, each in enumerate(filter(is_users, hooks)):
        found.add_attributes(f"{path}: hook {number}", each)


def _add_variables(found: Fingerprint, path: str, kind: type) -> None:
    """The plain values in variables of modules that the methods of the user's classes name."""
    for each in kind.__mro__:
        if is_of_project(each.__module__):
            for method in vars(each).values():
                if isinstance(method, FunctionType):
                    for name, value in variables_of(method):
                        if is_plain(value):
                            found.add(f"{path}: {name}", value)


@cache
def _state_of_engines() -> frozenset[str]:
    """The attributes of an engine's state that are saved, or belong to the loop."""
    return frozenset({*vars(Engine(lambda engine, batch: None).state), "seed"})


def _check_data(what: str, loader: object, known: Sequence[object] = ()) -> None:
    if can_be_read_once(loader) and not keeps_state(loader):
        get_logger("pulsetrain").warning(
            f"{what} is an iterator, which can be read once: a run resumed from a checkpoint cannot continue "
            "exactly; give a DataLoader, an object whose __iter__ starts again, or one with state_dict() and "
            "load_state_dict()",
            loader=type(loader).__name__,
        )
    generators = _own_generators(loader, known)
    if generators:
        get_logger("pulsetrain").warning(
            f"{what} holds random generators of its own, whose state is in no checkpoint: a resumed run "
            "draws other numbers from them; draw from random, numpy.random or torch, whose states a run restores",
            generators=generators,
        )


def _own_generators(loader: object, known: Sequence[object] = ()) -> list[str]:
    """Where the loader's parts hold generators that no pass seeds, except in parts that keep their own state."""
    if not isinstance(loader, DataLoader):
        return [] if keeps_state(loader) else list(generators_in({"loader": loader}, known))
    parts = {name: getattr(loader, name) for name in ("dataset", "sampler", "batch_sampler", "collate_fn")}
    samplers = [parts["sampler"], parts["batch_sampler"]]
    samplers += [getattr(each, "sampler", None) for each in samplers]
    generators = [getattr(each, "generator", None) for each in samplers]
    seeded = [each for each in generators if isinstance(each, Generator)]  # each pass does
    skipped: list[object] = [each for each in parts.values() if keeps_state(loader) and keeps_state(each)]
    if getattr(loader.dataset, "draws_nothing", False) is True:
        skipped.append(loader.dataset)
    return list(generators_in(parts, [*seeded, *skipped, *known]))


def _check_half(holder: object, what: str) -> None:
    there = [name for name in _METHODS if callable(getattr(holder, name, None))]
    if len(there) != 1:
        return
    (lacking,) = set(_METHODS) - set(there)
    get_logger("pulsetrain").warning(
        f"{what} has {there[0]}() and no {lacking}(): its state is not saved; give it both",
        handler=type(holder).__name__,
    )
