"""Writes the model as a folder that `from_pretrained` loads, while it trains."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from pulsetrain.engine import ConfigurationError, Engine, Event, Events, Every, Phase, is_training_run
from pulsetrain.engine.checkpoint.disk import Disk
from pulsetrain.engine.distributed.joining import busy
from pulsetrain.engine.distributed.ranks import is_sharded, ranks
from pulsetrain.engine.distributed.shards import is_shard
from pulsetrain.engine.errors import ArgumentTypeError
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.metrics import Mode
from pulsetrain.engine.optional import load_optional
from pulsetrain.engine.training_run import model_of, validation_contexts
from pulsetrain.handlers.attachment.attachment import Handler
from pulsetrain.handlers.attachment.cadence import check_every, reading_events
from pulsetrain.handlers.attachment.engine_queries import reject_replay
from pulsetrain.handlers.metric_values.best_value import (
    check_judged,
    check_mode,
    decide_mode,
    is_better,
    judged_name,
    subscribe_judge,
)
from pulsetrain.handlers.run_files.ownership import FolderUse
from pulsetrain.handlers.run_files.run_folder import local_folder, make_folder

__all__ = ["HuggingFaceExporter"]


class HuggingFaceExporter(Handler):
    """Writes FOLDER/pretrained/last at a cadence and at the run's end, and FOLDER/pretrained/best by a metric.

    Each is a folder of `save_pretrained`, with the tokenizer and a file export.json that names the iteration. A folder
    is replaced as a whole: readers see the old or the new one, also after a crash. If an export fails, a warning says
    so, and the run continues; "best" is then replaced by the next validation that is better than the one it holds.
    "last" has the weights that were trained, "best" those that were validated: with EMA or SWA the average.

    For a model with peft adapters, `merge` writes the model with the adapters added to its weights; for this, the
    whole model is copied to the host. Otherwise, only the adapters are written, which are small.

    If several processes hold one sharded model, each of them needs this handler: all gather the weights, tensor
    by tensor, and the main one, whose host holds them all, writes. Adapters of a sharded model cannot be merged here;
    `pulsetrain export` does that afterwards.

    Args:
        folder: the run folder, on this machine.
        every: when to write "last"; None for only the end of the run.
        tokenizer: an object with a method `save_pretrained`, or the folder of a tokenizer; None for no tokenizer.
        merge: whether adapters are merged; models without adapters are written as a whole in any case.
        metric: of validations or rollouts, such as "val/loss": decides when "best" is written; None for no "best".
        mode: whether smaller ("min") or larger ("max") is better; by default as the metric or its name says.

    Raises:
        ConfigurationError: not a metric's name, or an unknown mode.
        TypeError: the cadence is not an Every, or the tokenizer cannot be saved.

    >>> import tempfile
    >>> class Model(nn.Linear):  # in place of a model of transformers
    ...     def save_pretrained(self, folder, **options):
    ...         Path(folder, "config.json").write_text("{}")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     engine = Engine(lambda engine, batch: None)
    ...     engine.model = Model(1, 1)
    ...     exporter = HuggingFaceExporter(folder).attach(engine)
    ...     state = engine.run([1.0, 2.0])
    ...     sorted(path.name for path in Path(folder, "pretrained", "last").iterdir())
    ['config.json', 'export.json']
    """

    every: Every | None
    merge: bool
    metric: str

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: Every | None = Every(epochs=1),  # noqa: B008  # a frozen value
        *,
        tokenizer: Any = None,
        merge: bool = False,
        metric: str | None = None,
        mode: Mode | None = None,
    ) -> None:
        check_every("HuggingFaceExporter", every, "Every(epochs=1)", or_none=True)
        if metric is not None:
            check_judged("HuggingFaceExporter", metric, mode)
        check_mode("HuggingFaceExporter", mode)
        self.folder: Path = local_folder("HuggingFaceExporter", folder)
        self.every, self.merge, self.metric = every, merge, metric or ""
        self.mode: Mode | None = mode
        self.tokenizer: Any = _tokenizer(tokenizer)
        self.best_value: float | None = None
        self.best_iteration: int | None = None
        self._exported_at: int | None = None  # the iteration of "last"

    @property
    def plan(self) -> tuple[object, ...]:
        """What it writes and when; the processes of a sharded model need equal plans."""
        return self.every, self.merge, self.metric, self.mode

    def attach(self, engine: Engine) -> Self:
        """Export this engine's model, in phase PERSIST.

        Raises:
            RecordingError: the engine is a replay.
            ConfigurationError: its model has no save_pretrained(); it is sharded and its adapters are to be merged; or
                the trainer never validates, and has no rollouts that could report the metric.
            MetricNotFoundError: the trainer has validation sets, and the metric is named after none of them.
            RunFolderError: the folder cannot be written.
        """
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            reject_replay("HuggingFaceExporter", engine, "weights")
            model = model_of(engine)
            if not callable(getattr(model, "save_pretrained", None)):
                raise ConfigurationError(
                    f"HuggingFaceExporter: the model of {engine.name!r}, {type(model).__name__}, has no "
                    "save_pretrained(folder); train a model of transformers or peft, or give it that method"
                )
            if self.merge and is_sharded(model):
                raise ConfigurationError(
                    "no process has the weights that the adapters would be added to; leave it out, and use "
                    "`pulsetrain export` afterwards",
                    "HuggingFaceExporter",
                    merge=True,
                )
            if ranks().is_main:
                make_folder("HuggingFaceExporter", self.folder / "pretrained")
                FolderUse("HuggingFaceExporter", subscribe, lambda: self.folder)
            if self.metric:
                subscribe_judge(subscribe, self._judge, "HuggingFaceExporter", self.metric, engine, Phase.PERSIST)
                decide_mode("HuggingFaceExporter", self, engine)
            subscribe(Events.STARTED, self._on_started, phase=Phase.COMPUTE)
            if self.every is not None:
                subscribe(reading_events(self.every), self._export_last, phase=Phase.PERSIST)
            subscribe(Events.COMPLETED, self._export_last, phase=Phase.PERSIST)
        return self

    def state_dict(self) -> dict[str, object]:
        """The best value and its iteration; the weights are only in the exported folder."""
        return {"best_value": self.best_value, "best_iteration": self.best_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the best value and its iteration."""
        self.best_value, self.best_iteration = state["best_value"], state["best_iteration"]

    def _on_started(self, engine: Engine) -> None:
        self._exported_at = None
        if ranks().is_main:
            for name in ("last", "best"):
                Disk().recover_folder(self._target(name))

    def _export_last(self, engine: Engine) -> None:
        if is_training_run(engine) and engine.is_rewinding:
            return  # this state is about to be discarded
        if self._exported_at == engine.state.iteration:  # a cadence and the run's end coincide
            return
        if self._export(engine, "last", {}):
            self._exported_at = engine.state.iteration

    def _judge(self, engine: Engine, event: Event) -> None:
        name = judged_name("HuggingFaceExporter", self.metric, engine, event)
        if name is None:
            return
        value = float(event.payload.metrics[name])
        if not is_better(value, self.best_value, decide_mode("HuggingFaceExporter", self)):
            return
        validated = event.type == Events.VALIDATION_COMPLETED.value
        with ExitStack() as stack:
            for context in (validation_contexts(engine) or ()) if validated else ():
                stack.enter_context(context())  # the weights that were validated
            exported = self._export(engine, "best", {"metric": name, "value": value})
        if exported:
            self.best_value, self.best_iteration = value, engine.state.iteration

    def _export(self, engine: Engine, name: str, facts: Mapping[str, object]) -> bool:
        """Write the folder; returns whether there is no need to try again."""
        model: Any = model_of(engine)
        options: dict[str, Any] = {}
        with busy():
            if is_sharded(model):
                options["state_dict"] = _gathered(model)
            if not ranks().is_main:
                return True
            facts = {"iteration": engine.state.iteration, "update": engine.state.update, **facts}
            target = self._target(name)
            try:
                Disk().replace_folder(target, lambda folder: self._write(model, folder, options, facts))
            except Exception as error:  # of the packages that write: it costs this export, not the run
                get_logger("handlers").warning(
                    "the model was not exported; the run continues, and an older export stays",
                    folder=str(target),
                    error=f"{type(error).__name__}: {error}",
                )
                return is_sharded(model)  # the other processes, who have gathered the weights, do not know
        return True

    def _write(self, model: Any, folder: Path, options: dict[str, Any], facts: Mapping[str, object]) -> None:
        adapters = getattr(model, "peft_config", None)
        if adapters is not None and self.merge:
            _on_host(model).merge_and_unload().save_pretrained(str(folder), **options)
        else:
            if adapters is not None:  # not a reference that a strategy keeps, and nothing is looked up on the network
                options = {**options, "selected_adapters": _active(model), "save_embedding_layers": False}
            with _unchanged(model):
                model.save_pretrained(str(folder), **options)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(str(folder))
        (folder / "export.json").write_text(json.dumps(facts) + "\n")

    def _target(self, name: str) -> Path:
        return self.folder / "pretrained" / name


def _tokenizer(given: Any) -> Any:
    if isinstance(given, str | os.PathLike):
        transformers: Any = load_optional("HuggingFaceExporter", "transformers", "huggingface")
        return transformers.AutoTokenizer.from_pretrained(os.fspath(given), local_files_only=True)
    if given is not None and not callable(getattr(given, "save_pretrained", None)):
        raise ArgumentTypeError(
            "needs an object with save_pretrained(folder), the folder of a tokenizer, or None",
            "HuggingFaceExporter",
            tokenizer=type(given),
        )
    return given


def _gathered(model: nn.Module) -> dict[str, Tensor]:
    """The whole weights on the host, in the main process; all processes of a sharded model call this."""
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if is_shard(value) else value  # type: ignore[attr-defined]  # of a DTensor
        if ranks().is_main:
            found[name] = whole.detach().cpu()
    return found


def _on_host(model: nn.Module) -> Any:
    """A copy of the model on the host, made without memory of the device."""
    copies: dict[int, object] = {}
    for parameter in model.parameters():
        copies[id(parameter)] = nn.Parameter(parameter.detach().to("cpu", copy=True), requires_grad=False)
    for buffer in model.buffers():
        copies[id(buffer)] = buffer.detach().to("cpu", copy=True)
    return copy.deepcopy(model, copies)


def _active(model: Any) -> list[str]:
    active: Any = getattr(model, "active_adapters", None) or getattr(model, "active_adapter", "default")
    return [active] if isinstance(active, str) else list(active)


@contextmanager
def _unchanged(model: Any) -> Iterator[None]:
    """A block after which the configurations of a model are as before: save_pretrained writes into them."""
    base = model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model
    adapters = getattr(model, "peft_config", None)
    held = [getattr(base, "config", None), getattr(base, "generation_config", None)]
    held += list(adapters.values()) if isinstance(adapters, Mapping) else []
    before = [(each, dict(vars(each))) for each in held if hasattr(each, "__dict__")]
    try:
        yield
    finally:
        for each, attributes in before:
            vars(each).clear()
            vars(each).update(attributes)
