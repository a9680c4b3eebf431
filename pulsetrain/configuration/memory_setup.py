"""From a configuration to the parts of its run that need memory, without values or with them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pulsetrain.configuration.assemble import Parts, make_parts, topology_of, with_run_folder
from pulsetrain.configuration.instantiate import instantiate
from pulsetrain.engine import ConfigurationError, PulsetrainError, TorchBackend
from pulsetrain.engine.argument_checks import check_type
from pulsetrain.engine.backends.torch import find_device
from pulsetrain.engine.data import rng
from pulsetrain.engine.memory.setup import Setup, model_without_values, no_values
from pulsetrain.training.initial_state import make_store

__all__ = ["setup_with_values", "setup_without_values"]


def setup_without_values(config: Mapping[str, Any], base: Path) -> tuple[Setup, list[str]]:
    """The setup for an estimate, and notes about what it leaves out.

    The model is made on the meta device; if its constructor needs values, it is made with them, and copied without.

    Args:
        config: the configuration, as `read_config` returns it.
        base: the folder in which class paths are looked up first.

    Raises:
        PulsetrainError: a part cannot be made, as for `pulsetrain train`; or its memory cannot be estimated.
    """
    notes: list[str] = []

    def make_model() -> Any:
        try:
            with torch.device("meta"):
                return instantiate(config["model"], "model")
        except PulsetrainError as error:
            made = instantiate(config["model"], "model")  # if the configuration is wrong, this says so
            notes.append(f"the model's constructor needs values, so it was made with them ({_reason(error)})")
            return made

    topology, parts = topology_of(config), _parts(config, base, make_model)
    _check(parts)
    if parts.training.compile or parts.backend.requested_compile:
        notes.append("it is the estimate of the model that is not compiled, which may need more")
    batch, mode = _first_batch(parts), no_values()
    chosen = parts.training.device if parts.backend.requested_device is None else parts.backend.requested_device
    device = torch.empty(0, device=find_device(chosen)).device  # with its index
    parts = replace(parts, model=model_without_values(parts.model, mode, device))
    with mode:
        setup = _setup(parts, batch, with_values=False)
    if topology is not None and (topology.shard, topology.tensor, topology.pipeline) != (1, 1, 1):
        setup.backend.check_sharded(parts.strategy, setup.optimizer, pipelines=topology.pipeline > 1)  # type: ignore[attr-defined]  # by _check
    return setup, notes


def setup_with_values(config: Mapping[str, Any], base: Path) -> Setup:
    """The setup for a measurement.

    Raises:
        PulsetrainError: as above.
    """
    parts = _parts(config, base, None)
    _check(parts)
    return _setup(parts, _first_batch(parts), with_values=True)


def _parts(config: Mapping[str, Any], base: Path, make_model: Any) -> Parts:
    settings = with_run_folder(config.get("training") or {}, "runs")
    if settings.get("seed") is None:
        settings["seed"] = rng.current_seed()
    alone = {name: each for name, each in config.items() if name != "parallel"}
    return make_parts(alone, base, settings, make_model)


def _check(parts: Parts) -> None:
    if not isinstance(parts.backend, TorchBackend):
        raise ConfigurationError(
            f"backend: {type(parts.backend).__name__} computes with values, whose memory is not estimated; choose torch"
        )
    if not isinstance(parts.model, nn.Module):
        raise ConfigurationError("model: the memory of several models that learn in turns is not estimated")
    if getattr(parts.train_loader, "fires_rollouts", False):
        raise ConfigurationError("data: the policy makes its batches while it trains, so there is none to begin with")


def _first_batch(parts: Parts) -> Any:
    check_type("Trainer", "train_loader", parts.train_loader, Iterable, "an iterable of batches, such as a DataLoader")
    batch = next(iter(parts.train_loader), None)
    if batch is None:
        raise ConfigurationError("data: the training set has no batch; give it more data or a smaller batch size")
    return batch


def _setup(parts: Parts, batch: Any, *, with_values: bool) -> Setup:
    offload: Any = parts.training.optimizer_offload
    if offload is not None and offload.to == "disk" and offload.folder is None:
        offload = replace(offload, folder=tempfile.gettempdir())  # there is no run folder
    training = replace(parts.training, compile=False, optimizer_offload=offload if with_values else None)
    parts.backend.requested_compile = False  # a compiled model shows no operations
    store = make_store(parts.backend, parts.model, None, parts.strategy, training, training.seed or 0)
    accumulate = training.accumulation.batches_at(0) or 2
    store.module.train()
    setup = Setup(
        model=store.module,
        optimizer=store.optimizer,
        strategy=parts.strategy,
        backend=parts.backend,
        batch=batch,
        accumulate=accumulate,
    )
    return setup if offload is None or with_values else setup.with_settings(optimizer_offload=offload)


def _reason(error: Exception) -> str:
    return str(error.__cause__ or error).splitlines()[0]
