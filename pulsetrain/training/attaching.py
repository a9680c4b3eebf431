"""Attaches a trainer's handlers, what one of several processes writes for all in that one alone, and its rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from pulsetrain.engine import Engine
from pulsetrain.engine.distributed.collectives import ControlGroup
from pulsetrain.engine.distributed.ranks import is_sharded
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.logs import get_logger
from pulsetrain.handlers import Checkpointer, HuggingFaceExporter, SampleText
from pulsetrain.training.arguments import writes_for_all

__all__ = ["attach_handlers", "attach_rollouts"]


def attach_handlers(engine: Engine, model: nn.Module, handlers: Iterable[Any], control: ControlGroup) -> None:
    """Attach them in their order; every process has to call this.

    Args:
        engine: to attach them to.
        model: that it trains.
        handlers: of this process.
        control: joins the processes.

    Raises:
        ConfigurationError: the main process would save nothing, or the model is sharded, and the processes would save
            at different moments, or not act together.
    """
    handlers = list(handlers)
    if is_sharded(model):
        for kind in (HuggingFaceExporter, SampleText):
            plans = control.gather([each.plan for each in handlers if isinstance(each, kind)])
            other = next((rank for rank, plan in enumerate(plans) if plan != plans[0]), None)
            if other is not None:
                raise ConfigurationError(
                    f"rank {other} has other {kind.__name__}s than rank 0, and all processes of a sharded model act "
                    "together; give each process the same ones",
                    "Trainer",
                    handlers=[kind],
                )
    for_all = [control.is_shared and writes_for_all(each, model) for each in handlers]
    plans = control.gather([each.plan for each in handlers if isinstance(each, Checkpointer)])
    are_alike = all(plan == plans[0] for plan in plans)
    if not are_alike:
        _report_others(plans, sharded=is_sharded(model), is_main=control.ranks.is_main)
    for handler, alone in zip(handlers, for_all, strict=True):
        if not alone:
            handler.attach(engine)
        elif not isinstance(handler, Checkpointer) or not are_alike:
            if control.ranks.is_main:
                handler.attach(engine)
        elif control.ranks.is_main:
            handler.lead(engine)
        else:
            handler.follow(engine)


def attach_rollouts(trainer: Engine, train_loader: Any, val_loaders: Mapping[str, Any]) -> None:
    """Let the trainer's policy act in its rollouts: those that it learns from, and those that are validation sets.

    Raises:
        ConfigurationError: they do not fit the trainer.
    """
    if getattr(train_loader, "fires_rollouts", False):
        train_loader.attach(trainer)
    for loader in val_loaders.values():
        if getattr(loader, "judges_policy", False):
            loader.attach_for_validation(trainer)


def _report_others(plans: Sequence[object], *, sharded: bool, is_main: bool) -> None:
    rank = next(rank for rank, plan in enumerate(plans) if plan != plans[0])
    if not plans[0]:
        raise ConfigurationError(
            f"rank {rank} has a Checkpointer, and rank 0, which saves for all, has none, so nothing would be saved; "
            "give each process the same ones",
            "Trainer",
            handlers=[Checkpointer],
        )
    if sharded:
        raise ConfigurationError(
            f"rank {rank} has other Checkpointers than rank 0, or with another `every` or `at_end`, and each process "
            "saves its part of a sharded model; give each the same ones",
            "Trainer",
            handlers=[Checkpointer],
        )
    if not is_main:
        return
    get_logger("pulsetrain").warning(
        "the processes have other Checkpointers: a run that resumes has the loader's state of the main process in all, "
        "and reports a first mean loss without what the other processes had computed; give each process the same ones",
        rank=rank,
    )
