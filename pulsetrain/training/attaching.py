"""Attaches a trainer's handlers: what one of several processes writes for all, in that one alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from pulsetrain.engine import Engine
from pulsetrain.engine.distributed.collectives import ControlGroup
from pulsetrain.engine.logs import get_logger
from pulsetrain.handlers import Checkpointer
from pulsetrain.training.arguments import writes_for_all

__all__ = ["attach_handlers"]


def attach_handlers(engine: Engine, model: nn.Module, handlers: Iterable[Any], control: ControlGroup) -> None:
    """Attach them in their order; every process has to call this.

    Args:
        engine: to attach them to.
        model: that it trains.
        handlers: of this process.
        control: joins the processes.
    """
    handlers = list(handlers)
    for_all = [control.is_shared and writes_for_all(each, model) for each in handlers]
    savers = [each for each, alone in zip(handlers, for_all, strict=True) if alone and isinstance(each, Checkpointer)]
    plans = control.gather([each.plan for each in savers])
    are_alike = all(plan == plans[0] for plan in plans)
    if savers and not are_alike:
        get_logger("pulsetrain").warning(
            "the processes have other Checkpointers: a run that resumes between two log points reports a mean loss "
            "without what the other processes had computed; give each process the same ones"
        )
    for handler, alone in zip(handlers, for_all, strict=True):
        shares = alone and are_alike and isinstance(handler, Checkpointer)
        if alone and not control.ranks.is_main:
            if shares:
                handler.follow(engine)
            continue
        if shares:
            handler.share()
        handler.attach(engine)
