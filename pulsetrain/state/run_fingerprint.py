"""The fingerprint of everything that the next iteration of a run may depend on and that no part of its state saves."""

from __future__ import annotations

import dis
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from functools import cache, partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pulsetrain.engine import Engine, TrainingRun
from pulsetrain.engine.optimizers import parts_of
from pulsetrain.state.current_metrics import unsavable_metrics
from pulsetrain.state.fingerprint import Fingerprint
from pulsetrain.state.handler_registry import HandlerRegistry, is_foreign, owner_of
from pulsetrain.state.held_values import (
    CONTAINERS,
    attributes_of_module,
    is_plain,
    own_attributes,
    values_of_class,
    variables_of,
)
from pulsetrain.state.loader_parts import parts_of_loader
from pulsetrain.state.module_state import DROPOUTS, modules_in
from pulsetrain.state.object_graph import is_of_project, is_users, of_process, package_of
from pulsetrain.state.part import keeps_state
from pulsetrain.state.run_state import Counters

__all__ = ["fingerprint_of_run"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OWN = ("pulsetrain", "ignite")


def fingerprint_of_run(
    run: TrainingRun, registry: HandlerRegistry, own: Container[str], variables: Mapping[str, object]
) -> Fingerprint:
    """Of everything that the next iteration may depend on and that no other part saves.

    Args:
        run: whose state.
        registry: its handlers and other subscribers.
        own: the names of the run's own attributes, which are not compared.
        variables: those of a loop written by hand that keep state, by name.
    """
    modules = dict(_modules(run.model, run.strategy))
    loaders = _loaders_of(run)
    known: list[object] = [run, run.evaluator, run.strategy, run.optimizer, run.backend]
    known += [each for _, loader, parts in loaders for each in (loader, *parts.values())]
    known += [*registry.saved(), *modules.values(), *parts_of(run.optimizer).values()]
    known += registry.metrics()
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
        of_model = set(map(id, tensors))
        found.add(
            f"{path}: parameters that are not the model's", [id(each) for each in others if id(each) not in of_model]
        )
    engine = registry.engine
    saved = {
        *_state_of_engines(),
        *Counters.NAMES,
        *(engine.counter_of(event) for event in engine.registered_events),
    }
    state = {name: value for name, value in vars(engine.state).items() if name not in saved}
    found.add_attributes("state", SimpleNamespace(**state))
    for name, value in unsavable_metrics(engine.state.metrics).items():
        found.add(f"state.metrics[{name!r}]", value)
    if is_users(run.backend) and type(run.backend).state_dict.__module__.partition(".")[0] == "pulsetrain":
        found.add_attributes("backend", run.backend, _set_by_library(type(run.backend)))
    for name, value in {**values_of_class(type(run)), **vars(run)}.items():
        if name not in own:
            found.add(f"trainer.{name}", value)
    found.reads_generators = False  # of the data, they are reported at the start
    for prefix, loader, parts in loaders:
        _add_loader(found, prefix, loader, parts)
    found.reads_generators = True
    _add_subscribers(found, registry)
    for name, held in variables.items():
        found.add(f"variable {name} of the loop", held)
    return found


def _add_subscribers(found: Fingerprint, registry: HandlerRegistry) -> None:
    """What the user's handlers, functions and filters hold, and which there are."""
    for handler in registry.subscribers():
        if is_users(handler):
            path = f"handler {type(handler).__name__}"
            if not keeps_state(handler):
                found.add_attributes(path, handler)
                if isinstance(handler, CONTAINERS):
                    found.add_items(f"{path}: items", handler)
            _add_variables(found, path, type(handler))
    counts: Counter[str] = Counter()
    for subscription, handler in registry.listeners():
        path = f"handler {subscription.description}"
        if is_users(subscription.filter):
            found.add_attributes(f"{path}: filter", subscription.filter)
        owner = owner_of(handler)
        if owner is not None and is_foreign(owner):  # a list whose `append` subscribes
            found.add(f"{path}: object", owner)
        if not is_users(handler):
            continue
        counts[path] += 1
        found.hashes[path] = counts[path]
        if isinstance(handler, (FunctionType, partial)):
            found.add_attributes(path, handler)
            found.add(f"{path}: arguments", [*subscription.args, *subscription.kwargs.values()])
        elif isinstance(handler, MethodType) and isinstance(handler.__self__, type):  # a class method
            held = [*values_of_class(handler.__self__).items(), *variables_of(handler.__func__)]
            for name, value in held:
                if is_plain(value):
                    found.add(f"{path}: {name}", value)


@cache
def _set_by_library(kind: type) -> frozenset[str]:
    """The attributes that methods of the library's classes, of which this is a subclass, set on themselves."""
    methods = [
        method for each in kind.__mro__ if each.__module__.partition(".")[0] in _OWN
        for method in vars(each).values() if isinstance(method, FunctionType)
    ]  # fmt: skip
    return frozenset(
        str(each.argval) for method in methods for each in dis.get_instructions(method) if each.opname == "STORE_ATTR"
    )


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
        if (
            not keeps_state(each)
            or (isinstance(each, IterableDataset) and not keeps_state(loader))
            or (each is loader and prefix)  # whose state is not saved
        ):
            found.add_attributes(prefix + path, each, _numbers_of(path, each))


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
                    for name, value in own_attributes(method):
                        if is_plain(value):
                            found.add(f"{path}: {name}", value)


@cache
def _state_of_engines() -> frozenset[str]:
    """The attributes of an engine's state that are saved, or belong to the loop."""
    return frozenset({*vars(Engine(lambda engine, batch: None).state), "seed"})
