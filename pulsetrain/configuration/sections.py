"""The sections of a configuration, and what each of them holds."""

from __future__ import annotations

__all__ = ["NAMED", "SECTIONS"]

SECTIONS = {
    "run": "the run folder; `{n}` becomes the next free number",
    "model": "required: the class of the model, or a function that returns it",
    "data": "required: a function that returns the training loader, or a pair of the training and the validation "
    "loader; instead of the latter, a mapping of several by name",
    "strategy": "what is optimised",
    "backend": "what computes a step",
    "parallel": "how several processes share the model; one process, or copies of the model, without it",
    "metrics": "metrics by name, which are computed over each validation set",
    "training": "the settings of the run",
    "handlers": "what subscribes to the events of the run: checkpoints, recording, logs, early stopping",
}
NAMED = ("model", "data", "strategy", "backend")  # sections that may be a class path alone
