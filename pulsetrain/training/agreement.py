"""What the processes of a run agree on: when it ends, and why it cannot continue."""

from __future__ import annotations

import os
import socket
import sys
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path

import torch
from torch import nn

from pulsetrain.config import TrainingConfig
from pulsetrain.engine import LAST, Engine, Events, Phase
from pulsetrain.engine.data.loaders import length_of
from pulsetrain.engine.distributed.collectives import ControlGroup
from pulsetrain.engine.distributed.failures import Warden
from pulsetrain.engine.distributed.joining import check_alike, check_apart
from pulsetrain.engine.distributed.pulse import Pulse, StopRequest
from pulsetrain.engine.environment import describe_environment
from pulsetrain.engine.errors import PeerFailed
from pulsetrain.engine.events.filters import NEVER, EventFilter
from pulsetrain.engine.events.payloads import Preempted
from pulsetrain.state.data_cursor import DataCursor
from pulsetrain.training.drift import DriftCheck
from pulsetrain.training.stepper import Stepper

__all__ = ["Agreement"]

_MAY_DIFFER = ("threads", "platform", "processor")  # of the environments of two ranks
_LIBRARIES = ("builtins", "ignite", "pulsetrain", "torch", "typing")  # whose versions are compared
_COLLECTIVES = ("gloo", "nccl")  # in the message of one that failed


class Agreement:
    """Ends the run of all ranks at the same iteration, and gives each the first error of any.

    Args:
        control: joins the ranks; with one process nothing is agreed on.
        every: iterations between two log points, at which the ranks agree.
    """

    def __init__(self, control: ControlGroup, every: int) -> None:
        self.control = control
        self.attempt: str = control.broadcast(uuid.uuid4().hex)
        self.pulse: Pulse = Pulse(control, every)
        self.processes: list[dict[str, object]] = []  # host, pid and environment of each, in the main one of several
        self.drift: DriftCheck = DriftCheck(control)
        self._ends_together = False  # whether the ranks have agreed on the run's end

    @property
    def is_shared(self) -> bool:
        """Whether there are several processes."""
        return self.control.is_shared

    def attach(self, engine: Engine, stepper: Stepper, data: DataCursor) -> None:
        self._engine = engine
        if not self.is_shared:
            return
        self.drift.attach(engine, stepper, data)
        engine.add_event_handler(Events.STARTED, self._begin, phase=Phase.COMPUTE)
        further = Events.ITERATION_COMPLETED(once=NEVER)
        self._further = engine.bus.subscribe(
            further, self._beat_further, sender=engine, phase=Phase.PERSIST, order=LAST
        )
        for event in (Events.VALIDATION_COMPLETED, Events.EPOCH_COMPLETED):
            engine.bus.subscribe(event, self._beat, sender=engine, phase=Phase.PERSIST, order=LAST)

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Around collectives outside of a run, for this: where one fails, name the rank that is the cause.

        Raises:
            PeerFailed: another rank has failed, or does not come.
        """
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, PeerFailed) or not self.is_shared or not _is_of_a_collective(error):
                raise
            raise self.control.explained(error, what) from error

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around a run: an error of it reaches all ranks, and one of another rank ends it.

        Raises:
            PeerFailed: another rank has failed, or does not come to where all meet.
        """
        if self.control.board is None:
            yield
            return
        self.control.board.begin_run()
        ranks = self.control.ranks
        warden = Warden(self.control.board, (ranks.rank + 1) % ranks.world_size)
        warden.start()
        try:
            yield
        except BaseException as error:
            cause = self._cause_of(error)
            if cause is error:
                raise
            raise cause from error
        finally:
            warden.stop()

    def check_alike(
        self,
        config: TrainingConfig,
        model: object,
        strategy: object,
        loader: Iterable[object],
        device: torch.device,
        further: Mapping[str, object],
    ) -> None:
        """Refuse ranks that were started differently; `model` may be several modules by name, `further` are more facts.

        Raises:
            ConfigurationError: they were, or two of them share a GPU; the message names a rank, what differs, and both
                values.
        """
        if not self.is_shared:
            return
        check_apart(self.control, device)
        settings = {each.name: getattr(config, each.name) for each in fields(config)}
        modules = model if isinstance(model, Mapping) else {"": model}
        shapes = {
            (part, name): tuple(each.shape)
            for part, module in modules.items()
            for name, each in (module.state_dict().items() if isinstance(module, nn.Module) else ())
            if hasattr(each, "shape")
        }
        environment = describe_environment(device)
        here: dict[str, object] = {"host": socket.gethostname(), "pid": os.getpid(), "environment": environment}
        self.processes = self.control.collect(here)
        versions = {name: each for name, each in environment.items() if name not in _MAY_DIFFER}
        check_alike(
            self.control,
            {
                "batches in a pass": length_of(loader),
                "the model's tensors": sorted(shapes.items()),
                **settings,
                **further,
                **versions,
                **_code_of([strategy, *(part for each in modules.values() for part in _parts_of(each))]),
            },
        )

    def ask(self, reason: str, *, observed: bool, signal: str = "", skip_completed: bool = False) -> None:
        """Ask for the run's end, which all ranks reach together; see `Pulse`."""
        self.pulse.ask(reason, observed=observed, signal=signal, skip_completed=skip_completed)

    def sums(self, values: Sequence[float]) -> list[float]:
        """The sums over the ranks at a log point, where they also agree on whether the run ends."""
        return self._meet(values)

    def _cause_of(self, error: BaseException) -> BaseException:
        """What to raise for an error of the run: that of the rank which failed first, if this is its consequence."""
        board = self.control.board
        assert board is not None
        state = self._engine.state
        where = f"epoch {state.epoch}, iteration {state.iteration}"
        if isinstance(error, PeerFailed):
            board.post(error, where)  # where it is the first to notice
            return error
        if isinstance(error, (KeyboardInterrupt, SystemExit)) and self._ends_together:
            return error  # raised after the run has ended, in every process
        cause: BaseException = error
        if isinstance(error, RuntimeError) and _is_of_a_collective(error):
            cause = self.control.explained(error, "the gradients of a step")
        board.post(cause, where)
        return cause

    def _begin(self) -> None:
        self._ends_together = False
        self.pulse.begin(self._engine.state.iteration)
        self._place_further()

    def _beat_further(self) -> None:
        self._meet(fixed=False)

    def _beat(self) -> None:
        self._meet()

    def _place_further(self) -> None:
        """Subscribe to the further iteration alone: in those between, the engine does not look here."""
        at = self.pulse.further
        if self._further.filter != (due := EventFilter(once=(NEVER if at is None else at,))):
            self._further.refilter(due)

    def _meet(self, values: Sequence[float] = (), *, fixed: bool = True) -> list[float]:
        """A pulse: agree on whether the run ends, compare what is replicated, and add these values up."""
        own = self.drift.numbers()
        stop, sums = self.pulse.beat(self._engine.state.iteration, fixed=fixed, values=[*own, *values])
        self._place_further()
        self.drift.judge(sums[: len(own)])
        self._obey(stop)
        return sums[len(own) :]

    def _obey(self, stop: StopRequest | None) -> None:
        if stop is None:
            return
        self._ends_together = True
        engine, here = self._engine, self.control.ranks.rank
        if stop.signal and stop.rank != here:
            engine.fire(Events.PREEMPTED, Preempted(signal=stop.signal, rank=stop.rank), observed=True)
        whose = "" if stop.rank == here else f"rank {stop.rank}: "
        Engine.terminate(engine, stop.skip_completed, reason=whose + stop.reason, observed=stop.observed)


def _parts_of(model: object) -> Iterable[object]:
    return model.modules() if isinstance(model, nn.Module) else (model,)


def _code_of(objects: Iterable[object]) -> dict[str, str]:
    """Digests of the files that the classes of these objects and the program are written in, without libraries."""
    names = {kind.__module__ for each in objects for kind in type(each).__mro__} | {"__main__"}
    found: dict[str, str] = {}
    for name in sorted(names):
        file = getattr(sys.modules.get(name), "__file__", None)
        if name.partition(".")[0] in _LIBRARIES or not isinstance(file, str):
            continue
        with suppress(OSError):
            found[f"the code of {name}"] = f"{zlib.crc32(Path(file).read_bytes()):08x}"
    return found


def _is_of_a_collective(error: RuntimeError) -> bool:
    return any(word in str(error).lower() for word in _COLLECTIVES)
