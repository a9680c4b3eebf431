"""From a configuration to a trainer: its parts made in order, the run folder last."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pulsetrain.handlers as shipped_handlers
from pulsetrain.config import TrainingConfig
from pulsetrain.configuration.instantiate import build, look_in
from pulsetrain.configuration.parse import SECTIONS, differences, load_yaml
from pulsetrain.configuration.run_folder import Claim, describe_run, has_checkpoint, resolve_folder
from pulsetrain.engine import backends, schedules
from pulsetrain.engine import strategies as shipped_strategies
from pulsetrain.engine.backends import JaxBackend, TorchBackend
from pulsetrain.engine.data import rng
from pulsetrain.engine.data.keyed_loader import length_of
from pulsetrain.engine.errors import ConfigurationError, PulsetrainError
from pulsetrain.engine.logs import get_logger
from pulsetrain.trainer import Trainer

__all__ = ["Assembly", "assemble", "in_settings"]

HANDLERS = {
    name: getattr(shipped_handlers, name) for name in shipped_handlers.__all__ if not name.startswith("Callback")
}
STRATEGIES = {
    **{name: getattr(shipped_strategies, name) for name in shipped_strategies.__all__ if name.endswith("Strategy")},
    **shipped_strategies.STRATEGIES,
}
BACKENDS = {"TorchBackend": TorchBackend, "JaxBackend": JaxBackend, **backends.BACKENDS}

# What the trainer's parts call their arguments, and which setting of the configuration that is; the first that fits
# holds. For errors of the training section and of the Trainer alone: a schedule among the handlers keeps its own names.
SCHEDULES = "|".join(name for name in schedules.__all__ if isinstance(getattr(schedules, name), type))
AS_SETTINGS = [
    (r"^build_schedule\(warmup_steps=(.*?)\): leaves nothing of total_steps=(\d+).*",
     r"training.warmup_steps=\1: leaves nothing of the run's \2 updates; shorten it, or lengthen the run by its "
     r"training.max_* setting"),
    (r"^build_schedule\(total_steps=None\): the schedule '(\w+)'", r"training.schedule='\1': it"),
    (r"^build_schedule\(name='(\w+)'\): needs (\w+)", r"training.schedule='\1': needs schedule_options.\2"),
    (r"^build_schedule\(name=('.*?')\): unknown", r"training.schedule=\1: unknown schedule"),
    (r"^build_schedule\((learning_rate|min_lr_ratio|warmup_steps)=(.*?)\): ", r"training.\1=\2: "),
    (r"^build_schedule\((\w+)=(.*?)\): ", r"training.schedule_options.\1=\2: "),
    (r"^WSD\(decay_steps=(\d+)\): is more than warmup_steps=0 leaves of total_steps=(\d+)",
     r"training.schedule_options.decay_steps=\1: is more than the \2 updates that training.warmup_steps leaves"),
    (rf"^(?:{SCHEDULES})\((\w+)=(.*?)\): is above initial_lr=",
     r"training.schedule_options.\1=\2: is above training.learning_rate="),
    (rf"^(?:{SCHEDULES})\((\w+)=(.*?)\): ", r"training.schedule_options.\1=\2: "),
    (r"^create_optimizer\(name=('\w*')\): unknown", r"training.optimizer=\1: unknown optimizer"),
    (r"^create_optimizer\(name=('\w*')\): ", r"training.optimizer=\1: "),
    (r"^create_optimizer\(name=('\w*'), (.*?)\): ", r"training.optimizer=\1 with optimizer_options (\2): "),
    (r"^create_optimizer\(model=(\w+)\): ", r"model (\1): "),
    (r"^create_optimizer\((learning_rate|weight_decay)=(.*?)\): ", r"training.\1=\2: "),
    (r"^create_optimizer\((adam_\w+=.*?, (?:betas|eps)=.*?)\): ", r"training.optimizer_options (\1): "),
    (r"^create_optimizer\((\w+(?:\[[^]]*\])?)=(.*?)\): ", r"training.optimizer_options.\1=\2: "),
    (r"^(device|activation_checkpointing)=", r"training.\1="),
    (r"^(?:Precision\(name|TorchBackend\(precision)=('\w+').*?\): ", r"training.precision=\1: "),
    (r"^Trainer\(strategy=('.*?')\): unknown", r"strategy=\1: unknown strategy"),
    (r"^Trainer\((train_loader|val_loader)", r"data: Trainer(\1"),
    (r"^Trainer\(metrics=\{'(.*?)': .*?\}\): ", r"metrics.\1: "),
    (r"^Trainer\(handlers=\[(.*?)\]\): ", r"handlers (\1): "),
    (r"^in (training\.\w+): \w+\((\w+)=(.*?)\): ", r"\1.\2=\3: "),
    (r"^in (training\.\w+): \w+\(\): ", r"\1={}: "),
    (r"^in (training\.\w+): \w+\((.*?)\): ", r"\1 (\2): "),
    (r"^in training: TrainingConfig\((\w+=\d+, \w+=.*?)\): ", r"training (\1): "),
    (r"^in training: TrainingConfig\((\w+_options)=\{'(\w+)': (.*?)\}\): (.*); set ",
     r"training.\1.\2=\3: \4; set training."),
    (r"^in training: TrainingConfig\((\w+_options)=\{'(\w+)': (.*?)\}\): ", r"training.\1.\2=\3: "),
    (r"^TrainingConfig\(accumulate=Accumulate\((?:\w+=None, )*(\w+)=(.*?)(?:, \w+=None)*\)\): ",
     r"training.accumulate.\1=\2: "),
    (r"^Accumulate\((\w+)=(.*?)\): ", r"training.accumulate.\1=\2: "),
    (r"^TrainingConfig\((\w+)=\.\.\.\) and (.*) \w+=None", r"training.\1 and \2 training.\1=null"),
    (r"^(?:in training: )?TrainingConfig\((\w+)=(.*?)\): ", r"training.\1=\2: "),
    (r"^Trainer\.train\(resume='latest'\): ", "--resume latest: "),
]  # fmt: skip


@dataclass(frozen=True)
class Assembly:
    """A run ready to be trained."""

    trainer: Trainer
    claim: Claim

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.claim.folder


def assemble(
    config: Mapping[str, Any], base: Path, folder: str | Path | None = None, *, resume: str | None = None
) -> Assembly:
    """Make every part, and the run folder last; where a part fails, no new folder is left behind.

    Each part is made under the configuration's seed, whatever was drawn for the part before.

    Args:
        config: what `read_config` gave.
        base: the configuration file's folder; class paths are looked up there first.
        folder: the run folder, in place of the configuration's; `{n}` in it is the next free number.
        resume: "latest" or a checkpoint's path, where the folder may hold the run that goes on.

    Raises:
        PulsetrainError: a part cannot be made; the message names it.
    """
    pattern = str(folder or config["run"])
    place = resolve_folder(pattern, resume=resume, chosen=folder is not None)
    look_in(base)
    settings = _training_settings(config, place, resume)
    try:
        training = build({"class_path": TrainingConfig, "init_args": settings}, "training", settings="training")
    except PulsetrainError as error:
        raise in_settings(error) from error
    rng.seed_everything(training.seed)
    model = build(config["model"], "model")
    rng.seed_everything(training.seed)
    train_loader, val_loader = _loaders(build(config["data"], "data"))
    strategy = build(config["strategy"], "strategy", STRATEGIES)
    backend = build(config["backend"], "backend", BACKENDS)
    metrics = {name: build(spec, f"metrics.{name}") for name, spec in (config.get("metrics") or {}).items()}
    claim = _claim(pattern, place, numbered="{n}" in pattern and resume is None)
    try:
        if training.run_dir == str(place):
            training = replace(training, run_dir=str(claim.folder))
        made = [
            build(spec, f"handlers[{index}]", HANDLERS, folder=str(claim.folder))
            for index, spec in enumerate(config["handlers"] or ())
        ]
        try:
            trainer = Trainer(
                model, train_loader, val_loader, strategy=strategy, backend=backend, config=training, metrics=metrics,
                handlers=made,
            )  # fmt: skip
        except PulsetrainError as error:
            raise in_settings(error) from error
        described = {section: config[section] for section in SECTIONS if section in config}
        described |= {"run": str(claim.folder), "training": {**(described.get("training") or {}), "seed": trainer.seed}}
        if resume is None or not has_checkpoint(trainer):  # a run that saved nothing begins anew
            describe_run(claim.folder, described, trainer, base)
        else:
            _report_changes(claim.folder, described)
    except BaseException:
        claim.give_back()
        raise
    return Assembly(trainer, claim)


def _training_settings(config: Mapping[str, Any], folder: Path, resume: str | None) -> dict[str, Any]:
    """The section, with the seed drawn where it is null and the run folder where it is needed."""
    settings = deepcopy(dict(config.get("training") or {}))  # making its values changes some in place
    if "seed" in settings and settings["seed"] is None:
        begun = (_saved(folder).get("training") or {}).get("seed") if resume is not None else None
        settings["seed"] = begun if begun is not None else int.from_bytes(os.urandom(7), "big")
    if settings.get("save_every_n_epochs") is not None and settings.get("run_dir") is None:
        settings["run_dir"] = str(folder)
    return settings


def _claim(pattern: str, folder: Path, *, numbered: bool) -> Claim:
    """The folder; where another process has taken its number meanwhile, the next one."""
    while numbered:
        try:
            return Claim(folder, new=True)
        except FileExistsError:
            folder = resolve_folder(pattern)
    return Claim(folder)


def _loaders(data: Any) -> tuple[Any, Any]:
    train_loader, val_loader = data if isinstance(data, tuple) and len(data) == 2 else (data, None)
    named = val_loader if isinstance(val_loader, Mapping) else {"validation": val_loader}
    for name, loader in {"training": train_loader, **named}.items():
        if isinstance(loader, Iterable) and length_of(loader) == 0:
            raise ConfigurationError(
                f"data: the {name} set gives no batch, its length is 0; give it more data or a smaller batch"
            )
    return train_loader, val_loader


def in_settings(error: PulsetrainError) -> PulsetrainError:
    """The same error in the words of the configuration, where a part of the trainer raised it."""
    text = str(error)
    for form, setting in AS_SETTINGS:
        text, changed = re.subn(form, setting, text, count=1)
        if changed:
            break
    told = type(error)(text)
    for note in getattr(error, "__notes__", ()):
        told.add_note(note)
    return told


def _saved(folder: Path) -> dict[str, Any]:
    """The configuration that a run began with; empty where it cannot be read."""
    try:
        found = load_yaml((folder / "config.yaml").read_text(encoding="utf-8"))
    except Exception:  # gone or damaged: it is a record, the checkpoint is what counts
        return {}
    return found if isinstance(found, dict) else {}


def _report_changes(folder: Path, config: dict[str, Any]) -> None:
    saved = _saved(folder)
    if saved:
        saved.setdefault("backend", "torch")  # before there was a choice
    changed = list(differences({**saved, "run": ""}, {**config, "run": ""})) if saved else []
    if changed:
        get_logger("pulsetrain").warning(
            "the configuration has changed since the run began; its config.yaml stays as it was",
            changed="; ".join(changed),
        )
