"""How much memory a run needs: estimated without allocating any, and measured."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.memory.activation_offload import HostMemory, setting_of_estimate
from pulsetrain.engine.memory.live_tensors import COMPONENTS, PHASES, LiveTensors
from pulsetrain.engine.memory.optimizer_state import bytes_at_a_time
from pulsetrain.engine.memory.setup import Setup, faked, mode_of, without_values

__all__ = ["MemoryUse", "estimate", "measure"]

UPDATES = 2  # the optimizer's state exists from the first update on, and is there in the backward pass of the second


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """The memory of the tensors of a run, in bytes.

    Args:
        phases: at the peak of the forward pass, the backward pass and the update: bytes by component. "activations" are
            what the forward pass has made, "temporary" what the other two have made and not kept, "kernels" what an
            operation of the estimate needs for itself.
        saved: what the forward pass leaves for the backward pass, by the module that made it; "" is the model itself,
            and "loss" is outside of it.
        assumed: how often the model has read a value that the estimate does not know.
        unknown: what may keep memory of which an estimate does not know the size: operations, and the policy of
            activation_offload.
        allocated: the peak by the count of the device's allocator, which also sees what kernels allocate for
            themselves; None in an estimate.
    """

    phases: Mapping[str, Mapping[str, int]]
    saved: Mapping[str, int]
    assumed: int = 0
    unknown: tuple[str, ...] = ()
    allocated: int | None = None

    @property
    def peak_phase(self) -> str:
        """The phase in which most memory is in use."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak(self) -> int:
        """The most bytes in use at a time: by the allocator's count if there is one."""
        return sum(self.phases[self.peak_phase].values()) if self.allocated is None else self.allocated

    @property
    def components(self) -> dict[str, int]:
        """The most bytes of each component; they are not all reached at the same time."""
        return {name: max(at[name] for at in self.phases.values()) for name in COMPONENTS}


def estimate(setup: Setup) -> MemoryUse:
    """What the first and the later updates of a run need, without allocating it.

    The same code runs as in training, over tensors without values. Where the model reads a value, 0.0, 1 or False is
    assumed. Activations that activation_offload moves to the host or to a policy of the user's, and the optimizer's
    state that optimizer_offload keeps elsewhere, do not count, but for what an update works on at a time.

    >>> from pulsetrain.engine import SupervisedStrategy, TorchBackend
    >>> model = torch.nn.Linear(256, 256, bias=False)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> batch = torch.ones(8, 256), torch.zeros(8, 256)
    >>> strategy, backend = SupervisedStrategy("mse"), TorchBackend("cpu")
    >>> use = estimate(Setup(model=model, optimizer=optimizer, strategy=strategy, backend=backend, batch=batch))
    >>> use.components["parameters"], use.components["gradients"], use.components["optimizer"], use.peak_phase
    (262144, 262144, 524292, 'update')

    Raises:
        ConfigurationError: a shape depends on values, or an operation cannot be computed without them.
    """
    mode = mode_of(setup)
    if mode is None:
        setup = without_values(setup)
        mode = mode_of(setup)
    offload = setup.backend.settings.activation_offload
    if offload is not None:
        setup = setup.with_settings(activation_offload=setting_of_estimate(offload, setup.backend.device))
    try:
        with _silent():
            use = _with_state_elsewhere(_record(setup, mode), setup)
    except (DynamicOutputShapeException, NotImplementedError) as error:
        operation = getattr(error, "func", None) or str(error).splitlines()[0]
        raise ConfigurationError(
            f"{type(setup.model).__name__} cannot be estimated: {operation} needs the values of its tensors; measure it"
        ) from error
    policy = None if offload is None else offload.policy
    if policy is None or type(policy) is HostMemory:
        return use
    return replace(use, unknown=(*use.unknown, f"{type(policy).__name__}.pack"))


def _with_state_elsewhere(use: MemoryUse, setup: Setup) -> MemoryUse:
    """The same with the optimizer's state where optimizer_offload keeps it: by arithmetic."""
    setting, size = setup.backend.settings.optimizer_offload, use.components["optimizer"]
    if setting is None or not size or (setting.to == "host" and setup.backend.device.type == "cpu"):
        return use
    part = min(bytes_at_a_time(setting, size), size)
    phases = {phase: {**at, "optimizer": 0} for phase, at in use.phases.items()}
    # an update is made in parts, one after the other
    phases["update"] |= {"optimizer": part, "temporary": phases["update"]["temporary"] * part // size}
    return replace(use, phases=phases)


@contextmanager
def _silent() -> Iterator[None]:
    """Without torch's log of an error in an operation without values, which is raised as well."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def measure(setup: Setup) -> MemoryUse:
    """The same, measured over updates that are computed; they change the model and the optimizer."""
    use = _record(setup, None)
    return MemoryUse(phases=use.phases, saved=use.saved, allocated=_allocated(setup))


def _record(setup: Setup, mode: FakeTensorMode | None) -> MemoryUse:
    live = LiveTensors(setup.backend.device, mode)
    held = setup.batch if mode is None else faked(setup.batch, mode)
    live.mark(held, "batch")
    with live.watching(setup.model, setup.optimizer, setup.strategy):
        for _ in range(UPDATES):
            _update(setup, mode, live)
    return MemoryUse(
        phases={phase: live.peaks.get(phase, dict.fromkeys(COMPONENTS, 0)) for phase in PHASES},
        saved=dict(sorted(live.saved.items(), key=lambda each: -each[1])),
        assumed=live.assumed,
        unknown=tuple(sorted(live.unknown)),
    )


def _update(setup: Setup, mode: FakeTensorMode | None = None, live: LiveTensors | None = None) -> None:
    """One update as the trainer makes it; of several batches, two: from then on, nothing is added to the memory."""
    backend, strategy = setup.backend, setup.strategy
    state = backend.init(setup.model, setup.optimizer)
    gradients = None
    for _ in range(min(setup.accumulate, 2)):
        if live is not None:
            live.begin_batch()
            live.only_fake = mode is not None  # the batch itself counts as soon as it has no values
        batch = backend.prepare_batch(setup.batch, strategy)
        if mode is not None:
            batch = faked(batch, mode)
        if live is not None:
            live.only_fake = False
            live.mark(batch, "batch")
        with mode or nullcontext():
            if setup.accumulate == 1:
                backend.train_step(state, batch, strategy, donate=True)  # type: ignore[arg-type]  # by Setup's check
            else:
                gradients = backend.forward_backward(state, batch, strategy, 1 / setup.accumulate)  # type: ignore[arg-type]
    if gradients is not None:
        clips = backend.settings.clip_grad_norm is not None
        with mode or nullcontext():
            gradients = backend.finish_gradients(state, gradients, measure=clips)
            backend.apply_gradients(state, gradients, donate=True)


def _allocated(setup: Setup) -> int | None:
    """The peak of an update by the count of the device's allocator; None where it does not say."""
    device = setup.backend.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        _update(setup)
        return torch.cuda.max_memory_allocated(device)
    if device.type != "cpu":
        return None
    held = LiveTensors(device)
    held.mark(setup.batch, "batch")
    held.mark_state(setup.model, setup.optimizer, setup.strategy)
    return held.total + peak_allocated(lambda: _update(setup))


def peak_allocated(call: Callable[[], object]) -> int:
    """The most bytes that torch's allocator for the CPU held during the call, beyond those held before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    changes = [(each["ts"], each["args"]) for each in events if each.get("name") == "[memory]"]
    now = peak = 0
    for _, change in sorted(changes, key=lambda each: each[0]):
        now += change["Bytes"] if change["Device Type"] == 0 else 0
        peak = max(peak, now)
    return peak
