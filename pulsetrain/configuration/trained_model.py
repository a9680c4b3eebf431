"""The model of a run with the weights of one of its checkpoints, made from the run's configuration."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pulsetrain.configuration.assemble import make_parts, with_run_folder
from pulsetrain.configuration.class_paths import look_in
from pulsetrain.configuration.instantiate import instantiate
from pulsetrain.configuration.parse import read_config
from pulsetrain.configuration.rebuild import base_of
from pulsetrain.engine import ConfigurationError, TorchBackend
from pulsetrain.engine.argument_checks import check_type
from pulsetrain.engine.checkpoint import Location, load_weights, resolve
from pulsetrain.engine.data import rng
from pulsetrain.engine.distributed.pretrained import fill
from pulsetrain.engine.step.protocols import BindsModel, Tree

__all__ = ["example_inputs", "load", "run_holding", "trained_model"]


def load(path: str | os.PathLike[str], model: nn.Module | None = None, *, averages: bool = True) -> nn.Module:
    """A model with the weights of a checkpoint, in eval mode, to predict with.

    The weights are those that the run validated with: where EMA or SWA did that with averages, the averages. A log line
    says so. Before SWA has started, there are none. The average of a schedule-free optimizer is not in a checkpoint: a
    warning says that the weights are those that were trained.

    >>> import tempfile
    >>> import pulsetrain
    >>> from pulsetrain import Checkpointer, Trainer, TrainingConfig
    >>> model, data = nn.Linear(2, 1), [(torch.ones(4, 2), torch.ones(4, 1))]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = Path(folder, "run")
    ...     handlers, config = [Checkpointer(run)], TrainingConfig(progress=False)
    ...     history = Trainer(
    ...         model, data, strategy=pulsetrain.SupervisedStrategy("mse"), handlers=handlers, config=config
    ...     ).train()
    ...     loaded = pulsetrain.load(run, nn.Linear(2, 1))
    >>> torch.equal(loaded.weight, model.weight), loaded.training
    (True, False)

    Args:
        path: a run folder, for its latest checkpoint; `best` or `latest` in it, as "runs/a/best"; a checkpoint's
            folder; or a URL of one.
        model: gets the weights, converted to its dtype and on its device. With None, the model is built on the CPU from
            the run's configuration.
        averages: with False, load the weights that were trained in any case.

    Returns:
        The model.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or its weights do not fit the model; or the averages
            cannot be loaded, such as those of SWA in a model with batch normalisation, in a checkpoint that was saved
            before they were validated.
        ConfigurationError: no model was given, and the run has no configuration from which to build it.
    """
    checkpoint = resolve(path)
    if model is None:
        return trained_model(checkpoint, averages=averages)
    check_type("load", "model", model, nn.Module, "a torch module, which gets the weights")
    load_weights(model, checkpoint, averages=averages)
    return model.eval()


def trained_model(checkpoint: Location, *, averages: bool = True) -> nn.Module:
    """The run's model, on the CPU and in eval mode, with the weights of the checkpoint.

    Args:
        checkpoint: its folder, in a run folder.
        averages: as `load` takes it.

    Raises:
        ConfigurationError: the run was not made from a configuration, or its model is not a torch module.
        CheckpointError: the weights do not fit the model, or its frozen weights are not those of the run; or as `load`.
    """
    run, config = _run_and_config(checkpoint)
    look_in(base_of(run))
    seed = (config.get("training") or {}).get("seed")
    if seed is not None:  # what the checkpoint leaves out may have been drawn
        rng.seed_everything(seed)
    model = instantiate(config["model"], "model")
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"model: {type(model).__name__} is not a torch module, whose weights could be loaded")
    fill(model, torch.device("cpu"))
    load_weights(model, checkpoint, averages=averages)
    return model.eval()


def example_inputs(checkpoint: Location, model: nn.Module) -> Tree:
    """What the run's model gets of the first batch of its training data: a tensor, a tuple, or a mapping by name.

    Raises:
        ConfigurationError: the training data has no batch, or the policy makes it.
    """
    run, config = _run_and_config(checkpoint)
    settings = with_run_folder(config.get("training") or {}, str(run))
    if settings.get("seed") is None:
        settings["seed"] = rng.current_seed()
    alone = {name: each for name, each in config.items() if name != "parallel"}
    parts = make_parts(alone, base_of(run), settings, lambda: model)
    if getattr(parts.train_loader, "fires_rollouts", False):
        raise ConfigurationError("data: the policy makes its batches while it trains, so there is no example of one")
    loader: Iterable[Any] = parts.train_loader
    batch = next(iter(loader), None)
    if batch is None:
        raise ConfigurationError("data: the training set has no batch, of which an example is needed")
    if isinstance(parts.strategy, BindsModel):
        parts.strategy.bind(model, TorchBackend("cpu"))
    return parts.strategy.prepare_batch(batch).inputs


def run_holding(checkpoint: Location) -> Path:
    """The run folder of a checkpoint; its own folder if it is in none."""
    folder = Path(str(checkpoint))
    return folder.parent.parent if folder.parent.name == "checkpoints" else folder


def _run_and_config(checkpoint: Location) -> tuple[Path, Mapping[str, Any]]:
    run = run_holding(checkpoint)
    file = run / "config.yaml"
    if not file.is_file():
        raise ConfigurationError(
            f"{run}: has no config.yaml from which the model could be made; in Python, pass it: "
            "pulsetrain.load(path, model); what that returns can be exported by model.save_pretrained(folder) or "
            "torch.export"
        )
    return run, read_config(file, {})
