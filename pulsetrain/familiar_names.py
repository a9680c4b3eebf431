"""Names that other frameworks use for what is called differently here, so that an error can say the right one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from pulsetrain.engine.argument_checks import answer_unknown_keywords
from pulsetrain.engine.errors import ConfigurationError

__all__ = [
    "OF_CONFIG",
    "OF_EVALUATION",
    "OF_TRAIN",
    "OF_TRAINER",
    "SETTINGS",
    "familiar_setting",
    "knows_familiar_names",
    "missing_attribute",
    "no_strategy",
]

T = TypeVar("T")


def _all(remedy: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, remedy)


SETTINGS = {
    **_all("learning_rate=...", "lr", "learning_rate", "base_lr"),
    **_all("max_epochs=...", "epochs", "max_epochs", "num_epochs", "n_epochs", "num_train_epochs"),
    **_all("max_updates=...", "max_steps", "steps", "num_steps"),
    **_all("max_iterations=...", "max_iters", "iterations", "num_iterations"),
    **_all("accumulate=...", "accumulate_grad_batches", "gradient_accumulation_steps", "grad_accum"),
    **_all("clip_grad_norm=...", "gradient_clip_val", "max_grad_norm", "grad_clip", "clip_norm"),
    **_all("precision='bf16' or 'fp16'", "fp16", "bf16", "amp", "mixed_precision"),
    **_all("schedule='cosine'", "scheduler", "lr_scheduler", "lr_scheduler_type"),
    **_all("warmup_steps=...", "warmup", "num_warmup_steps"),
    **_all("early_stopping_patience=...", "patience"),
    **_all("run_dir=..., save_every_n_epochs=...", "output_dir", "save_dir", "default_root_dir", "checkpoint_dir"),
    **_all("save_every_n_epochs=...", "save_strategy"),
    **_all("log_every_n_steps=...", "logging_steps", "log_every", "log_interval"),
    **_all("validate_every=Every(epochs=1)", "eval_every", "eval_steps", "eval_strategy", "check_val_every_n_epoch"),
    **_all("validate_every=Every(iterations=100)", "val_check_interval"),
    **_all("progress=...", "enable_progress_bar", "verbose", "disable_tqdm"),
    **_all("device='cuda'", "accelerator", "use_cuda", "gpus"),
    **_all("device='cpu'", "use_cpu", "no_cuda"),
    **_all("compile=True", "torch_compile"),
    **_all("optimizer='adamw'", "optim"),
    **_all("optimizer_options={'betas': (0.9, 0.999)}", "adam_beta1", "adam_beta2"),
}
"""The setting for a keyword of another framework, with its value."""
_ELSEWHERE = {
    **_all("choose the batch size of the DataLoader", "batch_size", "per_device_train_batch_size"),
    **_all("choose num_workers of the DataLoader", "num_workers", "dataloader_num_workers"),
    **_all("give the loader fewer batches", "limit_train_batches", "limit_val_batches"),
    **_all("start processes with torchrun or `pulsetrain train --launch.nproc N`", "devices", "num_nodes", "nproc"),
    **_all("call train(resume=...), or use `pulsetrain train --resume`", "ckpt_path", "resume_from_checkpoint"),
    **_all("use the handler Checkpointer(folder, every=..., keep_last=...)", "save_steps", "save_total_limit"),
    **_all("use the handler BestModel('val/loss', restore=True)", "load_best_model_at_end"),
    **_all("use a handler, such as WandbLogger(project, folder)", "report_to"),
    **_all("use a handler, such as CSVLogger(folder)", "logger"),
    **_all("use the handler Profiler(folder)", "profiler"),
    **_all("use the handler TimeLimit('2h')", "max_time"),
    **_all("call run_two_batches(trainer) of pulsetrain.testing", "fast_dev_run"),
    **_all("call assert_overfits(trainer) of pulsetrain.testing", "overfit_batches"),
    **_all("call validate() before train()", "num_sanity_val_steps"),
    **_all("give the Trainer metrics, such as Accuracy()", "compute_metrics"),
    **_all("choose collate_fn of the DataLoader", "data_collator"),
    **_all("tokenize in the data set, or in collate_fn of the DataLoader", "processing_class", "tokenizer"),
    **_all(
        "pass it to the strategy, as SupervisedStrategy(loss_options={'label_smoothing': 0.1})",
        "label_smoothing_factor",
        "label_smoothing",
    ),
}

OF_CONFIG = {name: f"set {setting}" for name, setting in SETTINGS.items()} | _ELSEWHERE
"""What to write in place of a keyword that TrainingConfig does not have."""

OF_TRAINER = {
    **{name: f"pass config=TrainingConfig({setting})" for name, setting in SETTINGS.items()},
    **_ELSEWHERE,
    **_all(
        "pass strategy=SupervisedStrategy('mse'), or with a function of outputs and targets",
        "loss", "loss_fn", "criterion", "loss_function", "compute_loss",
    ),
    **_all("pass train_loader=...", "train_data", "train_dataloader", "train_dataloaders", "dataloader", "data"),
    **_all("pass train_loader=DataLoader(...)", "train_dataset", "dataset"),
    **_all("pass val_loader=...", "val_data", "val_dataloader", "val_dataloaders", "valid_loader", "validation_data"),
    **_all("pass val_loader=DataLoader(...)", "eval_dataset", "val_dataset"),
    **_all("pass handlers=[CSVLogger('runs/a')]", "logger", "loggers"),
    **_all("pass metrics={'accuracy': Accuracy()}", "compute_metrics"),
    **_all("give them to the loss of the strategy, as torch.nn.CrossEntropyLoss(weight=...)", "class_weight"),
    **_all("return it in the batch, and read it in a strategy of your own", "sample_weight"),
    **_all("call train(resume='latest')", "initial_epoch", "resume"),
    **_all("pass config=TrainingConfig(...)", "args", "training_args", "hparams"),
    **{
        name: f"pass config=TrainingConfig({name}=...)"
        for name in (
            "precision", "device", "compile", "seed", "schedule", "weight_decay", "warmup_steps", "accumulate",
            "clip_grad_norm", "max_iterations", "max_updates", "max_tokens", "progress",
        )
    },
}  # fmt: skip
"""What to write in place of a keyword that Trainer does not have."""

OF_TRAIN = {
    **{
        name: f"when making the Trainer, {remedy}" if remedy.startswith("pass ") else remedy
        for name, remedy in OF_TRAINER.items()
    },
    **{
        name: f"when making the Trainer, pass {name}=..."
        for name in (
            "model", "train_loader", "val_loader", "strategy", "optimizer", "backend", "config", "metrics", "handlers",
            "callbacks",
        )
    },
    **_all(
        "pass resume='latest', or the path of a checkpoint",
        "ckpt_path", "resume_from_checkpoint", "resume_from", "checkpoint", "initial_epoch",
    ),
}  # fmt: skip
"""What to write in place of a keyword that Trainer.train does not have."""

OF_EVALUATION = {
    **_all(
        "pass loader=...",
        "dataloaders", "dataloader", "test_dataloaders", "test_loader", "val_dataloaders", "val_loader", "data", "x",
    ),
    **_all("pass loader=DataLoader(...)", "dataset", "test_dataset", "eval_dataset", "datamodule"),
    **_all("call load_checkpoint(path) before", "ckpt_path", "checkpoint", "weights"),
    **_all("when making the Trainer, pass callbacks=...", "callbacks"),
    **_all("leave it out: the Trainer has a model", "model"),
    **_all("leave it out", "verbose"),
    **_all("choose the batch size of the DataLoader", "batch_size"),
}  # fmt: skip
"""What to write in place of a keyword that Trainer.validate, test and predict do not have."""

_SEVERAL_PROCESSES = "start several processes with torchrun or `pulsetrain train --launch.nproc N`"
_DISTRIBUTED = {  # to the argument of Topology, or the setting of the section parallel; "" where none is needed
    **_all("", "auto", "single", "ddp", "dp", "horovod", "xla"),
    **_all("shard", "fsdp", "fsdp2", "deepspeed"),
    **_all("tensor", "model_parallel"),
}

_ATTRIBUTES = {
    **_all("call train()", "fit", "run_training"),
    **_all("call validate(), or test(loader) for other data", "evaluate", "eval"),
    **_all("call predict(loader)", "predict_step", "inference"),
    **_all("call save_checkpoint()", "save", "save_model"),
    **_all("call load_checkpoint(path), or train(resume=path)", "load", "restore", "resume"),
    **_all("read state.epoch", "current_epoch", "epoch"),
    **_all("read state.update, or state.iteration for batches", "global_step", "step"),
    **_all("read state.metrics", "callback_metrics", "logged_metrics", "metrics"),
    **_all("read train_loader", "train_dataloader"),
    **_all("read val_loaders", "val_loader", "val_dataloaders"),
    **_all("pass it to the Trainer in handlers=[...], or call its attach(trainer)", "add_callback", "add_handler"),
    **_all("call log(name, value) for each", "log_dict", "log_metrics"),
}


def knows_familiar_names(names: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Let a class answer keywords that it does not have with the way to write it.

    >>> @knows_familiar_names({"colour": "pass color=..."})
    ... class Pen:
    ...     def __init__(self, color="black"): ...
    >>> Pen(colour="red")
    Traceback (most recent call last):
    pulsetrain.engine.errors.ArgumentTypeError: Pen(colour='red'): is not an argument; pass color=...

    Args:
        names: keyword of another framework -> the remedy.

    Raises, when an object is made: ArgumentTypeError.
    """

    def decorate(kind: type[T]) -> type[T]:
        answer_unknown_keywords(kind, names)
        return kind

    return decorate


def familiar_setting(name: str) -> str | None:
    """The setting of the training that another framework calls so, by its dotted name; None if there is none.

    >>> familiar_setting("training.lr"), familiar_setting("grad_clip"), familiar_setting("nonsense")
    ('training.learning_rate', 'training.clip_grad_norm', None)
    """
    setting = SETTINGS.get(name.removeprefix("training."))
    return None if setting is None else f"training.{setting.partition('=')[0]}"


def no_strategy(strategy: str, *, in_file: bool = False) -> str | None:
    """What to do in place of passing a loss, or another framework's name for the use of devices; None for other names.

    >>> no_strategy("mse")
    "is a loss; pass strategy=SupervisedStrategy('mse')"
    >>> print(no_strategy("deepspeed_stage_2", in_file=True))
    strategy is what is optimised, not how devices share the work; leave it out, start several processes with torchrun \
or `pulsetrain train --launch.nproc N`, and set parallel: {shard: N}

    Args:
        strategy: the name.
        in_file: whether a configuration file gives it, and not an argument.
    """
    name = strategy.lower()
    if _is_a_loss(name):
        return (
            f"is a loss; set strategy: {{class_path: supervised, init_args: {{loss: {name}}}}}"
            if in_file
            else f"is a loss; pass strategy=SupervisedStrategy({name!r})"
        )
    part = _DISTRIBUTED.get(name, _DISTRIBUTED.get(name.partition("_")[0]))  # ddp_spawn, deepspeed_stage_2
    if part is None:
        return None
    rule = "strategy is what is optimised, not how devices share the work; leave it out, "
    if not part:
        return f"{rule}and {_SEVERAL_PROCESSES}"
    shares = f"set parallel: {{{part}: N}}" if in_file else f"pass backend=TorchBackend(topology=Topology({part}=N))"
    return f"{rule}{_SEVERAL_PROCESSES}, and {shares}"


def _is_a_loss(name: str) -> bool:
    from pulsetrain.engine.losses import get_loss  # here: torch is not needed for the other names

    try:
        get_loss(name)
    except ConfigurationError:
        return False
    return True


def missing_attribute(owner: object, name: str) -> AttributeError:
    """The error for an attribute that a trainer does not have; it says what to use if the name is a familiar one."""
    try:
        object.__getattribute__(owner, name)
    except AttributeError as error:
        if name not in _ATTRIBUTES:
            return error
    return AttributeError(
        f"{type(owner).__name__} has no attribute {name!r}; {_ATTRIBUTES[name]}", name=name, obj=owner
    )
