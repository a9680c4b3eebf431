"""How a trainer's run begins: anew, or behind a checkpoint."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from pulsetrain.engine.checkpoint import CheckpointManager
from pulsetrain.engine.data import rng
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.metrics import MetricTracker
from pulsetrain.handlers import Checkpointer, MetricLogger
from pulsetrain.state.handler_registry import state_of, stateful
from pulsetrain.state.resume import COUNTERS

if TYPE_CHECKING:
    from pulsetrain.trainer import Trainer

__all__ = ["begin_anew", "checkpointer_of", "go_on", "resume_from"]


def begin_anew(trainer: Trainer) -> None:
    """From iteration 0: counters, history, handlers, the order of the data; not weights, optimizer, fp16 scale."""
    for handler in trainer.handlers:
        if isinstance(handler, Checkpointer) and trainer.state.iteration > 0:
            handler.refuse_another_run()  # before anything of the finished run is touched
    rng.seed_everything(trainer.seed)
    state = trainer.state
    state.max_epochs = state.max_iters = None
    trainer.set_counters(dict.fromkeys(COUNTERS, 0) | {"epoch_length": None})
    trainer.validated_at = -1
    trainer.stepper.reset()
    trainer.backend.begin_run()
    trainer.announced_skips = 0
    for losses in (trainer.losses, *trainer.named_losses.values()):
        losses.restart()
    trainer.history = MetricTracker()  # whoever holds the last run's keeps it
    trainer.position.restart()
    for key, handler in stateful(trainer).items():
        if key in trainer.states_at_first:
            handler.load_state_dict(trainer.states_at_first[key])
        else:  # it has been attached since, and has seen no run yet
            trainer.states_at_first[key] = state_of(key, handler)


def resume_from(trainer: Trainer, source: str | os.PathLike[str]) -> None:
    """Go on behind a checkpoint: "latest", or the one at a path; begins where no latest one is there yet.

    Raises:
        CheckpointError: it is damaged, or does not fit this trainer.
        ConfigurationError: "latest" without exactly one Checkpointer.
    """
    if source != "latest":
        trainer.load_checkpoint(source)
        return
    latest = checkpointer_of(trainer, "train(resume='latest')").manager.get_latest()
    if latest is not None:
        trainer.load_checkpoint(latest)
        return
    for handler in trainer.handlers:
        if isinstance(handler, MetricLogger):
            handler.begin_again()


def checkpointer_of(trainer: Trainer, asked_by: str) -> Any:
    """The one handler that saves.

    Raises:
        ConfigurationError: there is none, or there are several; the message says which method of Trainer asked.
    """
    found = [
        handler for handler in trainer.handlers if isinstance(getattr(handler, "manager", None), CheckpointManager)
    ]
    if len(found) != 1:
        raise ConfigurationError(
            f"Trainer.{asked_by}: needs exactly one Checkpointer among the handlers, and there are {len(found)}; "
            "pass handlers=[Checkpointer('runs/a')], or name the checkpoint's path"
        )
    return found[0]


def go_on(trainer: Trainer, loader: Any, max_epochs: int | None, max_iterations: int | None = None) -> None:
    """Go on behind the checkpoint that was loaded, to this bound."""
    state = trainer.state
    state.max_epochs, state.max_iters = max_epochs, max_iterations
    state.dataloader, trainer._internal_run_generator = loader, None
    trainer._init_iter = None
    if trainer._is_done(state):
        _stand_at_the_end(trainer)
    trainer._internal_run()  # not run(): where nothing is left to train it would begin from the start


def _stand_at_the_end(trainer: Trainer) -> None:
    """A checkpoint behind the last batch was loaded: what is left is the run's end."""
    trainer.position.resuming = False
    trainer.state.epoch = trainer.position.epoch
    if trainer.rng_to_restore is not None:
        rng.restore(trainer.rng_to_restore)
        trainer.rng_to_restore = None
