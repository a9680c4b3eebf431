"""Names that other frameworks use for arguments of handlers, so that an error can say the right one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

__all__ = ["remedies_for"]

_FOLDER = (
    *("dirpath", "dirname", "filepath", "save_dir", "log_dir", "logdir", "logging_dir", "output_dir", "backup_dir"),
    *("checkpoint_dir", "default_root_dir", "directory", "path", "filename"),
)
_METRIC = ("monitor", "metric_for_best_model", "metric_name", "score_name", "score_function")
_EPOCHS = ("every_n_epochs",)
_UPDATES = ("every_n_train_steps", "save_steps", "eval_steps", "update_every_n_steps")
_ITERATIONS = ("log_every_n_steps", "logging_steps", "log_freq", "log_interval", "every_n_steps")
_SECONDS = ("train_time_interval",)
_ANY_CADENCE = ("save_freq", "update_freq", "logging_interval", "period", "save_strategy")
_BEST_WEIGHTS = ("restore_best_weights", "load_best_model_at_end")

# parameters that the handler needs to have, what to write in place of the name, and the names in Lightning, Keras,
# transformers, ignite, torch and wandb; the first that fits counts
_REMEDIES: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    (("metric", "max_rewinds"), "pass metric='loss'", _METRIC),  # of the steps, not of validations
    (("metric",), "pass metric='val/loss'", _METRIC),
    (("metric", "mode"), "pass mode='max' or mode='min'", ("greater_is_better",)),
    (("metric", "mode"), "leave it out: a metric that is never reported is an error", ("strict",)),
    (("keep_best", "metric"), "pass keep_best=..., with metric='val/loss'", ("save_top_k",)),
    (("keep_best", "metric"), "pass metric='val/loss': the best is kept beside the last ones", ("save_best_only",)),
    (("keep_last", "keep_best"), "pass keep_last=..., or keep_best=... with a metric", ("n_saved",)),
    (("keep_last",), "pass keep_last=...", ("save_total_limit", "max_to_keep")),
    (("keep_last",), "leave it out: the last checkpoints are kept, as many as keep_last=...", ("save_last",)),
    (("keep_last",), "leave it out; BestModel('val/loss', folder=...) writes weights alone", ("save_weights_only",)),
    (("keep_last", "name"), "pass name=...", ("filename", "filename_prefix")),
    (("folder",), "pass folder=...", _FOLDER),
    (  # of gradients, which are complete only at an update
        ("every", "norm_type"),
        "pass every=Every(updates=100)",
        (*_EPOCHS, *_UPDATES, *_ITERATIONS, *_SECONDS, *_ANY_CADENCE),
    ),
    (("every",), "pass every=Every(epochs=1)", _EPOCHS),
    (("every",), "pass every=Every(updates=100)", _UPDATES),
    (("every",), "pass every=Every(iterations=100)", _ITERATIONS),
    (("every",), "pass every=Every(seconds=600)", _SECONDS),
    (("every",), "pass every=Every(epochs=1) or Every(iterations=100)", _ANY_CADENCE),
    (("patience",), "pass patience=...", ("early_stopping_patience",)),
    (("min_delta",), "pass min_delta=...", ("early_stopping_threshold", "threshold")),
    (("patience", "min_delta"), "leave it out, and add the handler NaNGuard()", ("check_finite",)),
    (("threshold", "threshold_mode"), "pass threshold=..., threshold_mode='abs'", ("min_delta",)),
    (("restore",), "pass restore=True", _BEST_WEIGHTS),
    ((), "add the handler BestModel('val/loss', restore=True)", _BEST_WEIGHTS),
    (("momentum",), "pass momentum=True", ("log_momentum",)),
    (("weight_decay",), "pass weight_decay=True", ("log_weight_decay",)),
    (("decay",), "pass decay=..., near 1", ("ema_decay", "beta")),
    (("decay",), "pass decay=1 - momentum", ("momentum",)),  # ignite's, the weight of the new value
    (("after_epoch",), "pass after_epoch=...", ("swa_epoch_start", "swa_start", "start_epoch")),
    (("seconds", "margin"), "pass seconds='2h'", ("duration", "max_time", "limit_sec")),
    (("updates", "iterations"), "pass updates=...", ("max_steps",)),
    (("interval", "stream"), "pass interval=..., in seconds", ("refresh_rate",)),
    (("schedule", "by"), "pass schedule=...", ("scheduler", "lr_scheduler")),
    (("schedule", "by"), "pass by='epoch' or by='update'", ("interval",)),
    (("start_lr",), "pass start_lr=...", ("min_lr", "init_lr")),
    (("end_lr",), "pass end_lr=...", ("max_lr",)),
    (("start_lr", "iterations"), "pass iterations=...", ("num_training", "num_iter")),
    (("run_name",), "pass run_name=...", ("name",)),
    (("experiment",), "pass experiment=...", ("experiment_name",)),
    (("project", "mode"), "pass mode='offline'", ("offline",)),
    (("hyperparameters",), "pass hyperparameters={...}", ("config", "params")),
    ((), "leave it out", ("verbose",)),
)


def remedies_for(kind: type) -> dict[str, str]:
    """What to write in place of keywords that other frameworks have and this class of handlers does not.

    >>> class Stopping:
    ...     def __init__(self, metric: str, every: int = 1): ...
    >>> remedies = remedies_for(Stopping)
    >>> remedies["monitor"], remedies["verbose"], "every_n_epochs" in remedies
    ("pass metric='val/loss'", 'leave it out', False)
    """
    parameters = inspect.signature(kind).parameters
    fitting = {name for name in parameters if name != "every" or _takes_every(parameters)}
    remedies: dict[str, str] = {}
    for needed, remedy, names in _REMEDIES:
        if fitting.issuperset(needed):
            for name in names:
                remedies.setdefault(name, remedy)
    return {name: remedy for name, remedy in remedies.items() if name not in parameters}


def _takes_every(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Whether the argument `every` is an `Every`, and not a number."""
    return "Every" in str(parameters["every"].annotation)
