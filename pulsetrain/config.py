"""The settings of a run, with their meanings and defaults; a TrainingConfig checks them when it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pulsetrain.engine import Accumulate, ConfigurationError, Every
from pulsetrain.engine.argument_checks import check_bool, is_number, is_whole
from pulsetrain.engine.data.rng import current_seed
from pulsetrain.engine.distributed.ranks import agreed
from pulsetrain.engine.errors import refused
from pulsetrain.engine.step.memory_settings import ActivationCheckpointing, ActivationOffload, OptimizerOffload
from pulsetrain.familiar_names import OF_CONFIG, knows_familiar_names

__all__ = ["TrainingConfig"]

PRECISIONS = ("fp32", "bf16", "fp16")
BOUNDS = ("max_epochs", "max_iterations", "max_updates", "max_tokens", "max_environment_steps")

# Keywords that the trainer passes itself, or knows by another name than torch does, and the settings to use instead.
_OWN = {name: (f"is a setting of its own; set {{{name}}}", (name,)) for name in (
    "optimizer", "schedule", "learning_rate", "weight_decay", "warmup_steps", "min_lr_ratio",
)}  # fmt: skip
_NOT_OPTIONS: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "optimizer_options": {
        "model": ("is what the Trainer was given; leave it out", ()),
        "optimizer": _OWN["optimizer"],
        "name": _OWN["optimizer"],
        "learning_rate": _OWN["learning_rate"],
        "lr": _OWN["learning_rate"],
        "weight_decay": _OWN["weight_decay"],
    },
    "schedule_options": {
        "name": _OWN["schedule"],
        "learning_rate": _OWN["learning_rate"],
        "total_steps": (
            "follows from the length of the run; set {max_updates} or {max_epochs}", ("max_updates", "max_epochs"),
        ),
        "warmup_steps": _OWN["warmup_steps"],
        "min_lr_ratio": _OWN["min_lr_ratio"],
        "T_0": ("is torch's name; pass first_cycle, in updates", ()),
        "T_mult": ("is torch's name; pass multiplier", ()),
        "eta_min": ("is torch's name; pass min_lr", ()),
    },
}  # fmt: skip


@knows_familiar_names(OF_CONFIG)
@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The settings of a run; [defaults] follow their meanings.

    >>> config = TrainingConfig(max_epochs=3, optimizer="sgd", optimizer_options={"momentum": 0.5})
    >>> config.optimizer, config.validate_every.epochs
    ('sgd', 1)
    >>> TrainingConfig(max_epochs=0)
    Traceback (most recent call last):
    pulsetrain.engine.errors.ConfigurationError: TrainingConfig(max_epochs=0): needs to be a whole number of at least 1

    Args:
        max_epochs: length of the run in passes over the data; 1 when no length is given [None].
        max_iterations: length in batches [None].
        max_updates: length in optimizer steps [None].
        max_tokens: length in predicted tokens; the batch that reaches it is the last [None].
        max_environment_steps: length in steps of EnvironmentRollouts; the rollout that reaches it is the last [None].
        optimizer: adamw, adam, sgd (momentum 0.9) ...; the Trainer also takes instances and factories ['adamw'].
        learning_rate: peak rate, above 0; None: 0.001, or the rate of an optimizer that the Trainer is given [None].
        weight_decay: 0 or more; None: 0, or the decay of an optimizer that the Trainer is given [None].
        no_decay: "auto" exempts biases, norms and embeddings from weight decay; None exempts nothing [None].
        optimizer_options: further keywords of the optimizer, such as betas or momentum [{}].
        schedule: constant, linear, polynomial, cosine, cosine_with_restarts, step, multi_step, exponential,
            inverse_sqrt, wsd or one_cycle; None does not change the rate ['constant'].
        warmup_steps: updates of linear warm-up, from 0 to the learning rate [0].
        min_lr_ratio: lowest rate of the schedule, relative to learning_rate; None: 0.1, and 0 for linear [None].
        schedule_options: further keywords of the schedule, such as step_size and gamma [{}].
        accumulate: batches per update, or an Accumulate; the batches left at the end make no update [1].
        clip_grad_norm: largest total L2 norm of the gradients; None does not clip [None].
        clip_grad_value: largest absolute value of a gradient's entry; None does not clip [None].
        precision: fp32, bf16 or fp16 (autocast) ['fp32'].
        device: "auto" (the accelerator if there is one), "cpu", "cuda", "cuda:1" ... ['auto'].
        compile: run the model through torch.compile [False].
        activation_checkpointing: modules that recompute activations: "blocks.*", or an ActivationCheckpointing [None].
        activation_offload: where activations are kept for the backward pass: "host", or an ActivationOffload [None].
        optimizer_offload: where the optimizer's state is kept: "host", "disk", or an OptimizerOffload [None].
        seed: seed of the data order and of all random numbers; None: torch's, as torch.manual_seed left it [None].
        skip_batches: batches to leave out, as [first, last] of the iterations that would train on them [()].
        validate_every: when to validate; None: only at the end. A run always ends with a validation [Every(epochs=1)].
        log_every_n_steps: iterations between two METRICS_LOGGED events; each copies the losses to the host [50].
        log_strategy_metrics: report the metrics of the strategy at log points, from the outputs of that step [True].
        progress: a progress line (in notebooks also the losses), unless a ProgressBar or ConsoleLogger is given [True].
        run_dir: the run folder, for save_every_n_epochs and optimizer_offload; the command line fills it in [None].
        save_every_n_epochs: adds a Checkpointer that saves into run_dir this often [None].
        early_stopping_patience: adds an EarlyStopping on val/loss that waits for this many validations [None].

    Raises:
        ConfigurationError: a setting is out of range, or two settings contradict each other.
    """

    max_epochs: int | None = None
    max_iterations: int | None = None
    max_updates: int | None = None
    max_tokens: int | None = None
    max_environment_steps: int | None = None
    optimizer: str = "adamw"
    learning_rate: float | None = None
    weight_decay: float | None = None
    no_decay: str | None = None
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    schedule: str | None = "constant"
    warmup_steps: int = 0
    min_lr_ratio: float | None = None
    schedule_options: Mapping[str, Any] = field(default_factory=dict)
    accumulate: int | Accumulate = 1
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    precision: str = "fp32"
    device: str = "auto"
    compile: bool = False
    activation_checkpointing: str | ActivationCheckpointing | None = None
    activation_offload: str | ActivationOffload | None = None
    optimizer_offload: str | OptimizerOffload | None = None
    seed: int | None = None
    skip_batches: Sequence[tuple[int, int]] = ()
    validate_every: Every | None = Every(epochs=1)  # noqa: RUF009  # it is frozen
    log_every_n_steps: int = 50
    log_strategy_metrics: bool = True
    progress: bool = True
    run_dir: str | None = None
    save_every_n_epochs: int | None = None
    early_stopping_patience: int | None = None

    def __post_init__(self) -> None:
        bounds = [name for name in BOUNDS if getattr(self, name) is not None]
        if len(bounds) > 1:
            raise refused(self, "a run has one bound; leave the others out", *bounds)
        for name in ("optimizer", "device"):
            self._require(name, lambda value: isinstance(value, str), "a name")
        self._require("schedule", lambda value: isinstance(value, str), "a name or None")
        for name in _NOT_OPTIONS:
            self._require(name, lambda value: isinstance(value, Mapping), "a mapping of keywords")
            self._check_options(name)
        for name in ("compile", "log_strategy_metrics", "progress"):
            check_bool("TrainingConfig", name, getattr(self, name))
        counts = ["log_every_n_steps", "save_every_n_epochs", "early_stopping_patience"]
        counts += [] if isinstance(self.accumulate, Accumulate) else ["accumulate"]
        for name in (*bounds, *counts):
            self._require(name, lambda value: is_whole(value) and value >= 1, "a whole number of at least 1")
        self._require("warmup_steps", lambda value: is_whole(value) and value >= 0, "a whole number, 0 or more")
        for name in ("learning_rate", "clip_grad_norm", "clip_grad_value"):
            self._require(name, lambda value: is_number(value) and value > 0, "a number above 0")
        self._require("weight_decay", lambda value: is_number(value) and value >= 0, "a number, 0 or more")
        self._require("min_lr_ratio", lambda value: is_number(value) and 0 <= value <= 1, "a number from 0 to 1")
        self._require("precision", lambda value: value in PRECISIONS, f"one of {', '.join(PRECISIONS)}")
        self._require(
            "activation_checkpointing",
            lambda value: isinstance(value, ActivationCheckpointing) or (isinstance(value, str) and value),
            "a name, an ActivationCheckpointing or None",
        )
        self._make("activation_offload", ActivationOffload, host=ActivationOffload())
        self._make("optimizer_offload", OptimizerOffload, host=OptimizerOffload(to="host"), disk=OptimizerOffload())
        self._require("no_decay", lambda value: value == "auto", "'auto' or None")
        if self.no_decay is not None and "no_decay" in self.optimizer_options:
            raise refused(self, "is in optimizer_options as well; give one of the two", "no_decay")
        if self.schedule is None:
            self._refuse_what_a_schedule_reads()
        self._require("seed", lambda value: is_whole(value) and 0 <= value < 2**63, "a whole number, 0 or more")
        self._require("validate_every", lambda value: isinstance(value, Every), "an Every, such as Every(epochs=1)")
        self._require("skip_batches", _are_ranges, "pairs of a first and a last iteration, such as [[481, 484]]")
        object.__setattr__(self, "skip_batches", tuple((first, last) for first, last in self.skip_batches))
        if self.save_every_n_epochs is not None and self.run_dir is None:
            raise refused(self, "needs run_dir, where to save", "save_every_n_epochs")

    @property
    def accumulation(self) -> Accumulate:
        """`accumulate` as an Accumulate."""
        return self.accumulate if isinstance(self.accumulate, Accumulate) else Accumulate(batches=self.accumulate)

    @property
    def chosen_seed(self) -> int:
        """The seed of a run that starts now: that of this configuration, or torch's in the main process."""
        return agreed(current_seed()) if self.seed is None else self.seed

    def _check_options(self, name: str) -> None:
        for key, value in getattr(self, name).items():
            given = {name: {key: value}}
            if not isinstance(key, str):
                raise ConfigurationError(f"needs the keyword as text, not {key!r}", "TrainingConfig", **given)
            if key in _NOT_OPTIONS[name]:
                rule, others = _NOT_OPTIONS[name][key]
                raise ConfigurationError(rule, "TrainingConfig", **given, **dict.fromkeys(others, ...))

    def _refuse_what_a_schedule_reads(self) -> None:
        idle: dict[str, object] = {"warmup_steps": 0, "min_lr_ratio": None, "schedule_options": {}}
        for name, default in idle.items():
            if getattr(self, name) != default:
                rule = "has no effect where {schedule} leaves the rate as it is; leave it out, or choose a schedule"
                raise refused(self, rule, name, "schedule")

    def _make(self, name: str, kind: type, **shorthands: object) -> None:
        """Replace a shorthand by what it means."""
        value = getattr(self, name)
        value = shorthands.get(value, value) if isinstance(value, str) else value
        object.__setattr__(self, name, value)
        names = " or ".join(map(repr, shorthands))
        self._require(name, lambda value: isinstance(value, kind), f"{names}, or an {kind.__name__}")

    def _require(self, name: str, rule: Callable[[Any], object], wanted: str) -> None:  # any value, to be checked
        value = getattr(self, name)
        if value is None and "None" in TrainingConfig.__annotations__[name]:
            return
        if not rule(value):
            raise refused(self, f"needs to be {wanted}", name)


def _are_ranges(value: object) -> bool:
    return isinstance(value, Sequence) and all(
        isinstance(pair, Sequence) and len(pair) == 2 and all(map(is_whole, pair)) and 1 <= pair[0] <= pair[1]
        for pair in value
    )
