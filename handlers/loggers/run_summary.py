"""Describes what is trained when a run starts, and the results when it ends."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from importlib.util import find_spec
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any, Self, TextIO, cast

from pulsetrain.engine import Engine, Event, Events, OnError, Phase, TrainingRun, is_training_run
from pulsetrain.engine.backends.module_view import reading_once
from pulsetrain.engine.durations import duration
from pulsetrain.engine.events.subscription import FIRST, LAST
from pulsetrain.engine.metrics import infer_mode
from pulsetrain.engine.notebook import notebook_shell
from pulsetrain.engine.optimizers import describe_optimizer
from pulsetrain.engine.plain_text import format_count
from pulsetrain.handlers.attachment.attachment import Handler
from pulsetrain.handlers.attachment.engine_queries import is_run_end
from pulsetrain.handlers.metric_values.best_value import is_better

__all__ = ["RunSummary", "best_in_history", "report_command"]

_VALUES = 6  # metrics that the last lines show


class RunSummary(Handler):
    """Writes a few lines when a run starts and when it has ended; a Trainer has one by default.

    At the start: device, precision, parameters, optimizer, schedule, data, length and seed. At the end: how long the
    run took, why it ended, the metrics with their best values, where the best checkpoint is, and possible next steps.

    Args:
        stream: by default stderr at the start of the run; in a notebook, which marks stderr as errors, stdout.
        ending: whether to name the run folder, and to write lines at the end; `pulsetrain train` does so itself.
        on_error: "raise" ends the run when the stream cannot be written, "warn" continues.

    >>> from pulsetrain import SupervisedStrategy, Trainer, TrainingConfig
    >>> from pulsetrain.testing import tiny_loader, tiny_model
    >>> config = TrainingConfig(seed=0, max_epochs=2, progress=False)
    >>> trainer = Trainer(
    ...     tiny_model(), tiny_loader(), strategy=SupervisedStrategy("mse"), config=config,
    ...     handlers=[RunSummary(stream=sys.stdout, ending=False)],
    ... )
    >>> _ = trainer.train()
    Training Sequential with 49 parameters on cpu in fp32, seed 0.
    AdamW(lr=0.001, betas=(0.9, 0.999), weight_decay=0), 8 iterations in 2 epochs, 32 samples an epoch.
    """

    def __init__(self, stream: TextIO | None = None, *, ending: bool = True, on_error: OnError = "raise") -> None:
        self.ending = ending
        self._given_stream = stream
        self._on_error = on_error
        self._started = 0  # nanoseconds, as the events have them: the report of the run names the same time
        self._first = 0  # iterations before this start

    def attach(self, engine: Engine) -> Self:
        """Describe the runs of the trainer.

        Raises:
            TypeError: it is not a trainer.
        """
        if not is_training_run(engine):
            raise TypeError(f"RunSummary.attach({type(engine).__name__}): needs a Trainer")
        with self._attachment.to(cast(Engine, engine), whole_bus=False) as subscribe:
            subscribe(Events.STARTED, self._on_started, phase=Phase.OBSERVE, order=FIRST, on_error=self._on_error)
            ends = Events.TERMINATE | Events.COMPLETED
            subscribe(ends, self._on_end, phase=Phase.PERSIST, order=LAST, on_error=self._on_error)
        return self

    def _on_started(self, engine: Engine, event: Event) -> None:
        self._started, self._first = event.time_ns, engine.state.iteration
        folder = _run_folder(engine) if self.ending else ""
        self._write(chain(_beginning(engine), [f"Run folder: {folder}"] if folder else []))

    def _on_end(self, engine: Engine, event: Event) -> None:
        if self.ending and is_run_end(engine, event):
            self._write(self._end(engine, event))

    def _end(self, engine: Engine, event: Event) -> Iterator[str]:
        state = engine.state
        took = duration(max(0, event.time_ns - self._started) / 1e9)  # the clock may have been set back
        why = f": {state.stop_reason}" if state.stop_reason else ""
        trained = state.iteration - self._first
        yield f"Ended after {format_count(state.iteration, 'iteration')} ({trained:,} in {took}){why}."
        values = list(_values(engine))[:_VALUES]
        if values:
            yield f"{', '.join(values)}."
        yield from _next_steps(engine)

    def _write(self, lines: Iterable[str]) -> None:
        usual = sys.stderr if notebook_shell() is None else sys.stdout
        stream = self._given_stream if self._given_stream is not None else usual
        if stream is None:  # closed by the caller, as with 2>&-
            return
        # not by tqdm.external_write_mode: a process that is killed in it leaves its lock taken for all that fork later
        stream.write("".join(f"{line}\n" for line in lines))
        stream.flush()


def _beginning(engine: Engine) -> Iterator[str]:
    run, state = cast(TrainingRun, engine), engine.state
    with reading_once(run.model):
        counts = [(each.numel(), each.requires_grad) for each in run.model.parameters()]
    total = sum(number for number, _ in counts)
    trained = sum(number for number, learns in counts if learns)
    of_them = "" if trained == total else f", of which {trained:,} are trained,"
    others = len(run.processes) - 1
    many = f" and {others} more process{'es' * (others > 1)}" if others > 0 else ""
    verb = f"Resuming after iteration {state.iteration:,}:" if state.iteration else "Training"
    where = f"on {run.backend.device}{many} in {run.config.precision}"
    yield f"{verb} {type(run.model).__name__} with {total:,} parameters{of_them} {where}, seed {run.seed}."
    parts = [describe_optimizer(run.optimizer)]
    if run.config.schedule not in (None, "constant"):
        parts.append(f"schedule {run.config.schedule}")
    epochs = f" in {format_count(state.max_epochs, 'epoch')}" if state.max_epochs else ""
    if run.total_iterations is not None:
        parts.append(f"{format_count(run.total_iterations, 'iteration')}{epochs}")
    elif epochs:
        parts.append(epochs.removeprefix(" in "))
    if samples := _samples(run.train_loader):
        parts.append(f"{samples} an epoch")
    for name, loader in run.val_loaders.items():
        if found := _samples(loader):
            parts.append(f"{found} in {name!r}")
    yield f"{', '.join(parts)}."


def _values(engine: Engine) -> Iterator[str]:
    """The losses and the metrics that are known to improve, each with its best value if the last one is worse."""
    run = cast(TrainingRun, engine)
    for name, value in engine.state.metrics.items():
        if name.partition("/")[0] not in (*run.val_loaders, "rollout"):
            continue
        mode = infer_mode(name, run.val_metrics)
        if not isinstance(value, int | float) or (mode is None and "loss" not in name):
            continue
        best = best_in_history(engine, name)
        yield f"{name} {value:.4g}" if best is None or best == value else f"{name} {value:.4g} (best {best:.4g})"


def best_in_history(engine: Engine, name: str) -> float | None:
    """The best value of a trainer's metric; None if it had no finite one, or which values are better is not known."""
    mode = infer_mode(name, cast(TrainingRun, engine).val_metrics)
    best: float | None = None
    for each in cast(Any, engine).history.get_history().get(name, ()) if mode is not None else ():
        best = each if mode is not None and is_better(each, best, mode) else best
    return best if best is not None and isfinite(best) else None


def _next_steps(engine: Engine) -> Iterator[str]:
    """Commands that work for what this run has kept."""
    handlers = _by_class(engine)
    saver, recorder = handlers.get("Checkpointer"), handlers.get("EventRecorder")
    if saver is None and recorder is None:
        yield "Nothing was kept; handlers=[Checkpointer('runs/a'), EventRecorder('runs/a')] would keep the run."
        return
    if saver is not None:
        best = saver.manager.get_best()
        latest = saver.manager.get_latest() if best is None else best
        if latest is not None:
            yield f"{'Best checkpoint' if best is not None else 'Checkpoint'}: {latest}"
            model = "" if Path(_run_folder(engine), "config.yaml").is_file() else ", model"
            yield f"{_continued(engine, handlers)}Predict: pulsetrain.load(path{model})"
    if recorder is not None:
        yield f"Look at it: {report_command(_run_folder(engine))}"


def report_command(folder: str | Path, program: Sequence[str] = ("pulsetrain",)) -> str:
    """The shell command that makes a run's report, with what has to be installed first."""
    needs = "" if find_spec("plotly") is not None else " (first: pip install plotly)"
    return f"{shlex.join([*program, 'report', str(folder)])}{needs}"


def _continued(engine: Engine, handlers: Mapping[str, object]) -> str:
    """How to train on; "" where the schedule has ended with the run."""
    if str(engine.state.stop_reason).endswith("was received"):
        return "Continue: trainer.train(resume='latest'). "
    if "LRScheduler" in handlers:
        return ""
    if str(engine.state.stop_reason).startswith("early stopping"):
        return "Continue: trainer.train(resume='latest'), with a larger patience. "
    bound = "max_epochs" if engine.state.max_epochs else "bound"
    return f"Continue: trainer.train(resume='latest'), with a larger {bound}. "


def _run_folder(engine: Engine) -> str:
    handlers = _by_class(engine)
    folders = (getattr(handlers.get(name), "folder", None) for name in ("Checkpointer", "EventRecorder"))
    return next((str(folder).removesuffix("/events") for folder in folders if folder is not None), "")


def _by_class(engine: Engine) -> dict[str, Any]:
    """The trainer's handlers by the name of their class and of the classes that it extends."""
    return {kind.__name__: each for each in cast(TrainingRun, engine).handlers for kind in type(each).__mro__}


def _samples(loader: object) -> str:
    dataset = getattr(loader, "dataset", None)
    return format_count(len(dataset), "sample") if isinstance(dataset, Sized) else ""
