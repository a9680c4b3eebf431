"""The settings of transformers' Trainer as a TrainingConfig."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from pulsetrain.adapters.hugging_face_fields import ELSEWHERE, OF_THE_RUN, REFUSED
from pulsetrain.config import TrainingConfig
from pulsetrain.engine import Every
from pulsetrain.engine.argument_checks import is_whole
from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.optional import load_optional

__all__ = ["from_huggingface"]

_PLACE = "from_huggingface"
_EXEMPT = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")  # as transformers names them
_OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd": "sgd", "adagrad": "adagrad", "rmsprop": "rmsprop",
}  # fmt: skip
# name there -> name here, and what its lr_scheduler_kwargs are called here
_SCHEDULES: dict[str, tuple[str, Mapping[str, str]]] = {
    "linear": ("linear", {}),
    "cosine": ("cosine", {}),
    "cosine_with_min_lr": ("cosine", {"min_lr": "min_lr", "min_lr_rate": "min_lr_ratio"}),
    "polynomial": ("polynomial", {"power": "power", "lr_end": "min_lr"}),
    "constant": ("constant", {}),
    "constant_with_warmup": ("constant", {}),
    "inverse_sqrt": ("inverse_sqrt", {"timescale": "timescale"}),
}


def from_huggingface(
    arguments: Any, model: nn.Module | None = None, *, batches_per_epoch: int | None = None
) -> TrainingConfig:
    """The TrainingConfig that trains as transformers' Trainer does with these TrainingArguments.

    Fields that change what is computed and that a TrainingConfig cannot express are refused. Fields about the data, the
    model, checkpoints and logging, which belong to other parts, are listed in one line of the log, with their
    counterparts here.

    >>> from transformers import TrainingArguments
    >>> arguments = TrainingArguments(max_steps=100, lr_scheduler_type="cosine", warmup_steps=10, save_strategy="no")
    >>> config = from_huggingface(arguments)
    >>> config.max_updates, config.schedule, config.learning_rate, config.warmup_steps, config.clip_grad_norm
    (100, 'cosine', 5e-05, 10, 1.0)

    Args:
        arguments: a `transformers.TrainingArguments`.
        model: needed with a weight decay, since its layers determine which parameters are exempt.
        batches_per_epoch: `len(loader)`; needed for a fraction of an epoch, a warm-up that is given as a share of the
            run, and gradients that are accumulated over a number of batches that does not divide an epoch.

    Raises:
        ConfigurationError: a field has no counterpart, or needs `model` or `batches_per_epoch`; the message says what
            to do. Or transformers is not installed.
        ArgumentTypeError: the argument is not a TrainingArguments.
    """
    kind = load_optional(_PLACE, "transformers", "huggingface").TrainingArguments
    if not isinstance(arguments, kind):
        raise ArgumentTypeError("needs a transformers.TrainingArguments", _PLACE, arguments=type(arguments))
    if not type(arguments).__module__.startswith("transformers."):
        rule = "are the settings of a trainer of another library; make a TrainingConfig, and choose a strategy for it"
        raise ConfigurationError(rule, _PLACE, arguments=type(arguments))
    if arguments.deepspeed:  # before anything reads what it sets
        raise ConfigurationError(REFUSED["deepspeed"], _PLACE, deepspeed=arguments.deepspeed)
    if batches_per_epoch is not None and not (is_whole(batches_per_epoch) and batches_per_epoch >= 1):
        rule = "needs to be a whole number of at least 1: len(loader)"
        raise ConfigurationError(rule, _PLACE, batches_per_epoch=batches_per_epoch)
    changed = _changed(arguments)
    for name, remedy in REFUSED.items():
        if name in changed:
            raise ConfigurationError(remedy, _PLACE, **{name: changed[name]})
    length, updates = _length(arguments, batches_per_epoch)
    config = TrainingConfig(
        **length,
        **_optimizer(arguments, model),
        **_schedule(arguments, updates),
        **_cadences(arguments),
        accumulate=arguments.gradient_accumulation_steps,
        clip_grad_norm=arguments.max_grad_norm or None,
        precision="bf16" if arguments.bf16 else "fp16" if arguments.fp16 else "fp32",
        device="cpu" if arguments.use_cpu else "auto",
        compile=bool(arguments.torch_compile),
        seed=arguments.seed,
        progress=not arguments.disable_tqdm,
    )
    _list_others(arguments, changed)
    return config


def _changed(arguments: Any) -> dict[str, Any]:
    """The fields that differ from their default, in plain values."""
    # fills in what depends on the machine, on the device and on compilation, too
    same = {name: getattr(arguments, name) for name in ("output_dir", "use_cpu", "torch_compile")}
    usual = type(arguments)(**same)
    fields = [field.name for field in dataclasses.fields(arguments)]
    changed = {name: _plain(getattr(arguments, name)) for name in fields}
    changed = {k: v for k, v in changed.items() if k in same or v != _plain(getattr(usual, k))}
    for name, value in changed.items():
        if name not in OF_THE_RUN and name not in ELSEWHERE and name not in REFUSED:
            rule = "is a field that from_huggingface does not know; leave it out, and set what it does by hand"
            raise ConfigurationError(rule, _PLACE, **{name: value})
    return changed


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def _length(arguments: Any, batches: int | None) -> tuple[dict[str, Any], int | None]:
    """The bound of the run, and its number of updates where it is known."""
    accumulate, epochs = arguments.gradient_accumulation_steps, arguments.num_train_epochs
    if (
        batches is not None
        and batches % accumulate
        and (arguments.max_steps < 0 or arguments.max_steps * accumulate > batches)
    ):
        rule = (
            f"does not divide the {batches} batches of an epoch: transformers makes an update of those that are left, "
            "here they count towards the next one; choose a divisor"
        )
        raise ConfigurationError(rule, _PLACE, gradient_accumulation_steps=accumulate)
    if arguments.max_steps > 0:
        return {"max_updates": arguments.max_steps}, arguments.max_steps
    updates = None if batches is None else math.ceil(epochs * (batches // accumulate))
    if float(epochs).is_integer():
        return {"max_epochs": int(epochs)}, updates
    if updates is None:
        rule = "is a fraction; pass {batches_per_epoch} as len(loader), or set max_steps"
        raise ConfigurationError(rule, _PLACE, num_train_epochs=epochs, batches_per_epoch=...)
    return {"max_updates": updates}, updates


def _optimizer(arguments: Any, model: nn.Module | None) -> dict[str, Any]:
    name = _plain(arguments.optim)
    if name not in _OPTIMIZERS:
        rule = (
            f"has no counterpart by name ({', '.join(_OPTIMIZERS)} have); pass the optimizer to Trainer(optimizer=...)"
        )
        raise ConfigurationError(rule, _PLACE, optim=name)
    options: dict[str, Any] = {}
    if _OPTIMIZERS[name] == "adamw":
        options = {"betas": (arguments.adam_beta1, arguments.adam_beta2), "eps": arguments.adam_epsilon}
    if name == "sgd":
        options = {"momentum": 0.0}
    if arguments.weight_decay:
        if model is None:
            rule = "depends on the layers of the model, some of which are exempt; pass {model}, too"
            raise ConfigurationError(rule, _PLACE, weight_decay=arguments.weight_decay, model=...)
        options["no_decay"] = ExemptNames(frozenset(exempt_of(model)))
    return {
        "optimizer": _OPTIMIZERS[name],
        "learning_rate": arguments.learning_rate,
        "weight_decay": arguments.weight_decay,
        "optimizer_options": options,
    }


@dataclasses.dataclass(frozen=True)
class ExemptNames:
    """A rule for `no_decay`: exempts the parameters with these names."""

    names: frozenset[str]

    def __call__(self, name: str, parameter: nn.Parameter) -> bool:
        return name in self.names


def exempt_of(model: nn.Module) -> set[str]:
    """The parameters that transformers exempts from weight decay: of LayerNorms, biases, and those named as norms.

    >>> sorted(exempt_of(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.BatchNorm1d(2))))
    ['0.bias', '1.bias', '1.weight', '2.bias']
    """
    exempt = {name for name, _ in model.named_parameters() if _EXEMPT.search(name.lower())}
    for path, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            exempt |= {f"{path}.{name}" if path else name for name, _ in module.named_parameters()}
    return exempt


def _schedule(arguments: Any, updates: int | None) -> dict[str, Any]:
    name, given = _plain(arguments.lr_scheduler_type), dict(arguments.lr_scheduler_kwargs or {})
    if name not in _SCHEDULES:
        remedy = {
            "reduce_lr_on_plateau": "set it to 'constant', and add the handler ReduceLROnPlateau(metric)",
            "warmup_stable_decay": "set it to 'constant', and add the handler LRScheduler(WSD(...))",
            "cosine_with_restarts": "set it to 'constant', and add the handler LRScheduler(CosineRestarts(...))",
        }.get(name, "set it to 'constant', and add the handler LRScheduler(...) with a schedule of your own")
        raise ConfigurationError(f"has no counterpart in a TrainingConfig; {remedy}", _PLACE, lr_scheduler_type=name)
    ours, names = _SCHEDULES[name]
    options: dict[str, Any] = {}
    for key, value in given.items():
        if key not in names:
            takes = f"only {', '.join(names)} can be carried over" if names else "nothing can be carried over"
            rule = f"{key!r} has no counterpart for {name!r}: {takes}; leave it out"
            raise ConfigurationError(rule, _PLACE, lr_scheduler_kwargs=given)
        if value is not None:
            options[names[key]] = value
    if ours == "polynomial":
        options.setdefault("min_lr", 1e-7)
    found: dict[str, Any] = {"schedule": ours, "warmup_steps": 0 if name == "constant" else _warmup(arguments, updates)}
    if "min_lr_ratio" in options:
        found["min_lr_ratio"] = options.pop("min_lr_ratio")
    elif ours == "cosine" and "min_lr" not in options:
        found["min_lr_ratio"] = 0.0
    return {**found, "schedule_options": options}


def _warmup(arguments: Any, updates: int | None) -> int:
    warmup: float = arguments.warmup_steps
    if warmup >= 1 or not warmup:
        return int(warmup)
    if updates is None:
        rule = "is a share of the run; pass {batches_per_epoch} as len(loader), or set max_steps or a number of updates"
        raise ConfigurationError(rule, _PLACE, warmup_steps=warmup, batches_per_epoch=...)
    return math.ceil(updates * warmup)


def _cadences(arguments: Any) -> dict[str, Any]:
    """When to validate, to log, and to save; transformers counts updates."""
    found: dict[str, Any] = {"validate_every": None}
    strategy = _plain(arguments.eval_strategy)
    if strategy == "epoch":
        found["validate_every"] = Every(epochs=1)
    if strategy == "steps":
        steps = arguments.eval_steps or arguments.logging_steps
        _check_count("eval_steps", steps)
        found["validate_every"] = Every(updates=int(steps))
    if _plain(arguments.logging_strategy) == "steps":
        _check_count("logging_steps", arguments.logging_steps)
        found["log_every_n_steps"] = int(arguments.logging_steps) * arguments.gradient_accumulation_steps
    if _plain(arguments.save_strategy) == "epoch":
        found |= {"run_dir": arguments.output_dir, "save_every_n_epochs": 1}
    return found


def _check_count(name: str, value: float) -> None:
    if value < 1:
        rule = "is a share of the run; pass a number of updates"
        raise ConfigurationError(rule, _PLACE, **{name: value})


def _list_others(arguments: Any, changed: Mapping[str, Any]) -> None:
    """Log the fields that belong to other parts."""
    saves = _plain(arguments.save_strategy)
    others = [name for name in changed if name in ELSEWHERE and (name, saves) != ("save_strategy", "epoch")]
    listed = [
        f"{name}={changed[name]!r}: {ELSEWHERE[name]}" for name in others if (name, saves) != ("save_strategy", "no")
    ]
    if saves == "steps":  # also where nobody has asked for it: transformers saves by default
        cadence = f"every=Every(updates={int(arguments.save_steps)})" if arguments.save_steps >= 1 else "every=..."
        listed.append(f"save_strategy='steps': add the handler Checkpointer({arguments.output_dir!r}, {cadence})")
    if listed:
        get_logger("pulsetrain").info("TrainingArguments that a TrainingConfig does not hold", fields=listed)
