"""From a configuration to a trainer: makes its parts in order, the run folder last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pulsetrain.config import TrainingConfig
from pulsetrain.configuration.claim import Claim, SharedClaim, has_checkpoint, resolve_folder, run_of, write_description
from pulsetrain.configuration.class_paths import Factory, look_in
from pulsetrain.configuration.instantiate import instantiate
from pulsetrain.configuration.messages import in_settings
from pulsetrain.configuration.parse import differences, redacted_options
from pulsetrain.configuration.sections import SECTIONS
from pulsetrain.configuration.shipped_handlers import HANDLERS
from pulsetrain.configuration.yaml_text import load_yaml
from pulsetrain.engine import ConfigurationError, Events, JaxBackend, MegatronBackend, PulsetrainError, TorchBackend
from pulsetrain.engine import strategies as shipped_strategies
from pulsetrain.engine.checkpoint import resolve
from pulsetrain.engine.data import rng
from pulsetrain.engine.data.loaders import length_of
from pulsetrain.engine.distributed.joining import join
from pulsetrain.engine.distributed.topology import Topology
from pulsetrain.engine.logs import get_logger
from pulsetrain.handlers.run_files.redaction import REDACTED, redacted
from pulsetrain.trainer import Trainer

__all__ = ["BACKENDS", "STRATEGIES", "Assembly", "Parts", "assemble", "make_parts", "topology_of", "with_run_folder"]

STRATEGIES: dict[str, Factory] = {
    **{name: getattr(shipped_strategies, name) for name in shipped_strategies.__all__ if name.endswith("Strategy")},
    **shipped_strategies.STRATEGIES,
}
BACKENDS: dict[str, Factory] = {
    "TorchBackend": TorchBackend,
    "JaxBackend": JaxBackend,
    "MegatronBackend": MegatronBackend,
    "torch": TorchBackend,
    "jax": JaxBackend,
    "megatron": MegatronBackend,
}


@dataclass(frozen=True)
class Assembly:
    """A run ready to be trained."""

    trainer: Trainer
    claim: Claim | SharedClaim

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.claim.folder


@dataclass(frozen=True)
class Parts:
    """What a trainer is made of, but for its handlers."""

    training: TrainingConfig
    model: Any
    train_loader: Any
    val_loader: Any
    strategy: Any
    backend: Any
    metrics: dict[str, Any]


def assemble(
    config: Mapping[str, Any],
    base: Path,
    folder: str | Path | None = None,
    *,
    resume: str | None = None,
    wait: bool = False,
) -> Assembly:
    """Make every part, and the run folder last; where a part fails, no new folder remains.

    The generators are seeded with the configuration's seed before each part is made: what one part draws does not
    change the next.

    Args:
        config: the configuration, as `read_config` returns it.
        base: the configuration file's folder; class paths are looked up there first.
        folder: the run folder, instead of the configuration's; `{n}` in it is the next free number.
        resume: "latest" or a checkpoint's path; then the folder may hold the run that is resumed.
        wait: until no other process owns the folder.

    Raises:
        PulsetrainError: a part cannot be made; the message names it.
    """
    if missing := redacted_options(config):
        raise ConfigurationError(
            f"{', '.join(missing)}: a credential is {REDACTED} in this configuration, which is of a run folder or was "
            f"copied from one; give it again: {' '.join(f'--{name}=VALUE' for name in missing)}"
        )
    pattern, control = str(folder or config["run"]), join()
    run_folder, settings = control.main_decides(
        lambda: _folder_and_settings(config, pattern, resume, chosen=folder is not None)
    )
    parts = make_parts(config, base, settings)
    training = parts.training
    owned: list[Claim] = []

    def claim_folder() -> Path:
        owned.append(_claim(pattern, run_folder, numbered="{n}" in pattern and resume is None, wait=wait))
        return owned[0].folder

    claimed = control.main_decides(claim_folder, patient=wait)
    claim: Claim | SharedClaim = owned[0] if owned else SharedClaim(claimed)
    try:
        if training.run_dir == str(run_folder):
            training = replace(training, run_dir=str(claim.folder))
        made = [
            instantiate(spec, f"handlers[{index}]", HANDLERS, folder=str(claim.folder))
            for index, spec in enumerate(config["handlers"] or ())
        ]
        try:
            trainer = Trainer(
                parts.model, parts.train_loader, parts.val_loader, strategy=parts.strategy, backend=parts.backend,
                config=training, metrics=parts.metrics, handlers=made,
            )  # fmt: skip
        except PulsetrainError as error:
            raise in_settings(error) from error
        if control.ranks.is_main:
            _describe(config, claim.folder, trainer, base, resume)
    except BaseException:
        claim.release()
        raise
    return Assembly(trainer, claim)


def make_parts(
    config: Mapping[str, Any],
    base: Path,
    settings: Mapping[str, Any],
    make_model: Callable[[], Any] | None = None,
) -> Parts:
    """Make what a trainer is made of, in order.

    Args:
        config: the configuration, as `read_config` returns it.
        base: the folder in which class paths are looked up first.
        settings: the training section, with a seed.
        make_model: makes the model in place of the configuration.

    Raises:
        PulsetrainError: a part cannot be made; the message names it.
    """
    look_in(base)
    training = instantiate({"class_path": TrainingConfig, "init_args": settings}, "training", settings="training")
    rng.seed_everything(training.seed)
    model = instantiate(config["model"], "model") if make_model is None else make_model()
    rng.seed_everything(training.seed)
    train_loader, val_loader = _loaders(instantiate(config["data"], "data"))
    strategy = instantiate(config["strategy"], "strategy", STRATEGIES)
    backend = _backend(config)
    metrics = {name: instantiate(spec, f"metrics.{name}") for name, spec in (config.get("metrics") or {}).items()}
    return Parts(training, model, train_loader, val_loader, strategy, backend, metrics)


def _describe(config: Mapping[str, Any], folder: Path, trainer: Trainer, base: Path, resume: str | None) -> None:
    """Write the run's description into its folder; of a run that continues, report what has changed in it."""
    described = _described(config, folder, trainer.seed)
    if resume is not None and has_checkpoint(trainer):
        _report_changes(folder, described)
        return
    write_description(folder, described, trainer, base)
    if resume is not None:  # a run that has saved nothing starts again
        _describe_again_once_loaded(config, folder, trainer, base)


def _folder_and_settings(
    config: Mapping[str, Any], pattern: str, resume: str | None, *, chosen: bool
) -> tuple[Path, dict[str, Any]]:
    """The run folder, and the training section with a seed."""
    folder = resolve_folder(pattern, resume=resume, chosen=chosen)
    return folder, _training_settings(config, folder, resume)


def _described(config: Mapping[str, Any], folder: Path, seed: int) -> dict[str, Any]:
    """The configuration that makes the run in that folder again."""
    described = {section: config[section] for section in SECTIONS if section in config}
    return {**described, "run": str(folder), "training": {**(described.get("training") or {}), "seed": seed}}


def _describe_again_once_loaded(config: Mapping[str, Any], folder: Path, trainer: Trainer, base: Path) -> None:
    """Correct the description when a checkpoint of another folder is loaded: from then on its seed holds."""
    written = trainer.seed

    def describe_again() -> None:
        nonlocal written
        if trainer.seed != written:
            written = trainer.seed
            write_description(folder, _described(config, folder, written), trainer, base)

    trainer.add_event_handler(Events.CHECKPOINT_LOADED, describe_again)


def _training_settings(config: Mapping[str, Any], folder: Path, resume: str | None) -> dict[str, Any]:
    """The training section, with a seed where it has none, and the run folder where a setting needs it."""
    settings = with_run_folder(config.get("training") or {}, str(folder))
    if settings.get("seed") is None:
        checkpoint = None if resume in (None, "latest") else resolve(str(resume))
        resumed = run_of(checkpoint) if isinstance(checkpoint, Path) else folder  # a URL has no run folder
        recorded = None if resume is None else (_recorded(resumed or folder).get("training") or {}).get("seed")
        settings["seed"] = recorded if recorded is not None else rng.current_seed()
    return settings


def topology_of(config: Mapping[str, Any]) -> Topology | None:
    """The topology of the section `parallel`; None without one.

    Raises:
        ConfigurationError: it has a wrong setting.
    """
    given = config.get("parallel")
    if given is None:
        return None
    made: Topology = instantiate({"class_path": Topology, "init_args": given}, "parallel", settings="parallel")
    return made


def _backend(config: Mapping[str, Any]) -> Any:
    """The backend, which gets the topology of the section `parallel`."""
    topology = topology_of(config)
    if topology is None:
        return instantiate(config["backend"], "backend", BACKENDS)
    backend = instantiate(config["backend"], "backend", BACKENDS, topology=topology)
    if getattr(backend, "topology", None) is not topology:
        raise ConfigurationError(
            f"parallel: {type(backend).__name__} does not take it; leave it out, or choose backend: torch"
        )
    return backend


def with_run_folder(training: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """A copy of the training section, with the run folder where a setting needs it."""
    settings = deepcopy(dict(training))  # some are changed in place when their objects are made
    needs = any(settings.get(name) is not None for name in ("save_every_n_epochs", "optimizer_offload"))
    if needs and settings.get("run_dir") is None:
        settings["run_dir"] = folder
    return settings


def _claim(pattern: str, folder: Path, *, numbered: bool, wait: bool) -> Claim:
    """Claim the folder; where another process has just claimed its number, the next one."""
    while numbered:
        try:
            return Claim(folder, new=True)
        except FileExistsError:
            folder = resolve_folder(pattern)
    return Claim(folder, wait=wait)


def _loaders(data: Any) -> tuple[Any, Any]:  # the Trainer checks what they are
    train_loader, val_loader = data if isinstance(data, tuple) and len(data) == 2 else (data, None)
    named = val_loader if isinstance(val_loader, Mapping) else {"validation": val_loader}
    for name, loader in {"training": train_loader, **named}.items():
        if isinstance(loader, Iterable) and length_of(loader) == 0:
            raise ConfigurationError(
                f"data: the {name} set has no batch, its length is 0; give it more data or a smaller batch size"
            )
    return train_loader, val_loader


def _recorded(folder: Path) -> dict[str, Any]:
    """The configuration that a run started with; empty where it cannot be read."""
    try:
        found = load_yaml((folder / "config.yaml").read_text(encoding="utf-8"))
    except Exception:  # missing or damaged: it is only a record, and the checkpoint decides
        return {}
    return found if isinstance(found, dict) else {}


def _report_changes(folder: Path, config: dict[str, Any]) -> None:
    recorded = _recorded(folder)
    if recorded:
        recorded.setdefault("backend", "torch")  # from before there was a choice
    changed = list(differences({**recorded, "run": ""}, {**redacted(config), "run": ""})) if recorded else []
    if changed:
        get_logger("pulsetrain").warning(
            "the configuration has changed since the run started; its config.yaml is kept as it was",
            changed="; ".join(changed),
        )
