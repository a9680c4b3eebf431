"""Callbacks of transformers' Trainer, on our runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

from pulsetrain.engine import Engine, Event, Events, Phase, TrainingRun, is_training_run
from pulsetrain.engine.distributed.launcher import started
from pulsetrain.engine.distributed.ranks import ranks
from pulsetrain.engine.errors import ArgumentTypeError
from pulsetrain.engine.metrics.reading import canonical
from pulsetrain.engine.optional import load_optional
from pulsetrain.engine.recording.log.records import MEASURED
from pulsetrain.handlers.attachment.attachment import Handler

__all__ = ["HuggingFaceCallbacks"]


class HuggingFaceCallbacks(Handler):
    """Calls callbacks that derive from transformers' `TrainerCallback`.

    They get a `TrainerState` that follows the run (`global_step` counts updates, `epoch` is a fraction, `log_history`
    holds the logged values, other than times, speeds and memory, which only `on_log` gets), the module, the optimizer
    and the loaders. Requests in `control` are carried out: `should_training_stop` and `should_epoch_stop` end the run
    or the epoch, `should_evaluate` validates, `should_save` saves a checkpoint, for which the trainer needs a
    Checkpointer. `should_log` has no effect: the run logs at its log points. Metrics have transformers' names: "loss",
    "eval_loss".

    >>> from transformers import TrainerCallback
    >>> class StopAtThree(TrainerCallback):
    ...     def on_step_end(self, args, state, control, **kwargs):
    ...         control.should_training_stop = state.global_step >= 3
    >>> from pulsetrain import SupervisedStrategy, Trainer, TrainingConfig
    >>> from pulsetrain.testing import tiny_loader, tiny_model
    >>> trainer = Trainer(
    ...     tiny_model(), tiny_loader(), strategy=SupervisedStrategy("mse"), config=TrainingConfig(progress=False),
    ...     handlers=[HuggingFaceCallbacks([StopAtThree()])],
    ... )
    >>> _ = trainer.train()
    >>> trainer.state.update, trainer.state.stop_reason
    (3, 'StopAtThree has set control.should_training_stop')

    Args:
        callbacks: in the order in which they are called.
        args: transformers' TrainingArguments, which some callbacks read. After each validation, `state.best_metric`
            follows their `metric_for_best_model`, as EarlyStoppingCallback needs it. They have no other effect.

    Raises:
        ArgumentTypeError: an object is not a TrainerCallback.
        ConfigurationError: transformers is not installed.
    """

    callbacks: list[Any]
    args: Any

    def __init__(self, callbacks: Sequence[Any], args: Any = None) -> None:
        module = load_optional("HuggingFaceCallbacks", "transformers.trainer_callback", "huggingface")
        for each in callbacks:
            if not isinstance(each, module.TrainerCallback):
                rule = "needs objects of a class that derives from transformers.TrainerCallback"
                raise ArgumentTypeError(rule, "HuggingFaceCallbacks", callbacks=[each])
        self.callbacks, self.args = list(callbacks), args
        self._state, self._control = module.TrainerState(), module.TrainerControl()
        self._exportable: type[Any] = module.ExportableState
        self._updates = 0  # at the end of the last batch

    def attach(self, engine: Engine) -> Self:
        """Call the callbacks at the events of the trainer, in phase ACT; loggers see what they decide.

        Raises:
            TypeError: it is not a trainer.
        """
        if not is_training_run(engine):
            raise TypeError(f"HuggingFaceCallbacks.attach({type(engine).__name__}): needs a Trainer")
        here, launched = ranks(), started()
        self._state.is_world_process_zero = here.is_main
        self._state.is_local_process_zero = launched.local_rank == 0 if launched.by else here.is_main
        with self._attachment.to(cast(Engine, engine), whole_bus=False) as subscribe:
            for event, deliver in (
                (Events.STARTED, self._on_started),
                (Events.EPOCH_STARTED, self._on_epoch_started),
                (Events.ITERATION_STARTED, self._on_batch_started),
                (Events.ITERATION_COMPLETED, self._on_batch_completed),
                (Events.METRICS_LOGGED, self._on_logged),
                (Events.VALIDATION_COMPLETED, self._on_validated),
                (Events.CHECKPOINT_SAVED, self._on_saved),
                (Events.EPOCH_COMPLETED, self._on_epoch_completed),
                (Events.COMPLETED, self._on_completed),
            ):
                subscribe(event, deliver, phase=Phase.ACT)
            subscribe(Events.OPTIMIZER_STEP_COMPLETED, self._on_updated, phase=Phase.ACT, passive=True)
        return self

    def state_dict(self) -> dict[str, object]:
        """The states of callbacks that export one, such as EarlyStoppingCallback's, the logs and the best metric."""
        states = [each.state()["attributes"] if isinstance(each, self._exportable) else {} for each in self.callbacks]
        found = self._state
        return {
            "callbacks": states,
            "log_history": list(found.log_history),
            "best": found.best_metric,
            "best_step": found.best_global_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the callbacks' states, what was logged, and the best metric."""
        for each, attributes in zip(self.callbacks, state["callbacks"], strict=True):
            for name, value in attributes.items():
                setattr(each, name, value)
        found = self._state
        found.log_history, found.best_metric = list(state["log_history"]), state["best"]
        found.best_global_step = state.get("best_step")

    def _call(self, hook: str, engine: Engine, **more: Any) -> None:
        run = cast(TrainingRun, engine)
        self._follow(engine)
        for each in self.callbacks:
            returned = getattr(each, hook)(
                self.args, self._state, self._control, model=run.model, optimizer=run.optimizer, lr_scheduler=None,
                train_dataloader=run.train_loader, eval_dataloader=next(iter(run.val_loaders.values()), None), **more,
            )  # fmt: skip
            self._control = self._control if returned is None else returned
            if self._control.should_training_stop and not engine.should_terminate:
                engine.terminate(reason=f"{type(each).__name__} has set control.should_training_stop")

    def _follow(self, engine: Engine) -> None:
        state, found = engine.state, self._state
        found.global_step = state.update
        length = state.epoch_length
        found.epoch = state.iteration / length if length else float(max(state.epoch - 1, 0))
        found.max_steps = cast(Any, engine).length.total_updates or -1 if hasattr(engine, "length") else -1
        found.num_train_epochs = state.max_epochs or 0

    def _obey(self, engine: Any) -> None:
        """Do what the callbacks have asked for."""
        control = self._control
        if control.should_evaluate:
            control.should_evaluate = False
            engine.validate()
        if control.should_save:
            control.should_save = False
            engine.save_checkpoint()
        if control.should_epoch_stop:
            control.should_epoch_stop = False
            engine.terminate_epoch()

    def _on_started(self, engine: Engine) -> None:
        self._updates = engine.state.update
        self._control.should_training_stop = False
        self._call("on_train_begin", engine)

    def _on_epoch_started(self, engine: Engine) -> None:
        self._call("on_epoch_begin", engine)

    def _on_batch_started(self, engine: Engine) -> None:
        if cast(TrainingRun, engine).accumulated == 0:
            self._call("on_step_begin", engine)

    def _on_updated(self, engine: Engine) -> None:
        self._call("on_optimizer_step", engine)

    def _on_batch_completed(self, engine: Engine) -> None:
        is_update, self._updates = engine.state.update != self._updates, engine.state.update
        self._call("on_step_end" if is_update else "on_substep_end", engine)
        self._obey(engine)

    def _on_logged(self, engine: Engine, event: Event) -> None:
        logs = {name.removeprefix("train/"): value for name, value in event.payload.metrics.items()}
        self._note(engine, event, logs)

    def _on_validated(self, engine: Engine, event: Event) -> None:
        metrics = {_evaluated(name): value for name, value in event.payload.metrics.items()}
        self._note(engine, event, metrics)
        self._call("on_evaluate", engine, metrics=metrics)
        self._judge(metrics)  # afterwards, as transformers does: callbacks compare with the best one before

    def _judge(self, metrics: Mapping[str, float]) -> None:
        """Note the best value of the metric that `args` name.

        Raises:
            MetricNotFoundError: the validation lacks it; the message lists those that exist.
        """
        wanted = getattr(self.args, "metric_for_best_model", None)
        if wanted is None:
            return
        name = wanted if wanted.startswith("eval_") else f"eval_{wanted}"
        value = metrics[canonical(name, metrics, place="TrainingArguments.metric_for_best_model")]
        state, is_greater = self._state, self.args.greater_is_better
        if state.best_metric is None:
            state.best_metric = float("-inf" if is_greater else "inf")
        if value > state.best_metric if is_greater else value < state.best_metric:
            state.best_metric, state.best_global_step = value, state.global_step

    def _note(self, engine: Engine, event: Event, logs: dict[str, float]) -> None:
        self._follow(engine)
        if not event.observed:  # else the checkpoints of equal runs would differ
            kept = {name: value for name, value in logs.items() if name not in MEASURED}
            self._state.log_history.append({**kept, "step": self._state.global_step, "epoch": self._state.epoch})
        self._call("on_log", engine, logs=logs)

    def _on_saved(self, engine: Engine) -> None:
        self._call("on_save", engine)

    def _on_epoch_completed(self, engine: Engine) -> None:
        self._call("on_epoch_end", engine)
        self._obey(engine)

    def _on_completed(self, engine: Engine) -> None:
        self._call("on_train_end", engine)


def _evaluated(name: str) -> str:
    """Transformers' name of a validation metric.

    >>> _evaluated("val/loss"), _evaluated("other/loss")
    ('eval_loss', 'eval_other_loss')
    """
    return f"eval_{name.removeprefix('val/').replace('/', '_')}"
