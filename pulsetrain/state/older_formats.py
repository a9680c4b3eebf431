"""Reads the state of a run as earlier versions wrote it."""

from __future__ import annotations

from collections.abc import Mapping

from pulsetrain.engine.errors import CheckpointError
from pulsetrain.state.part import StateDict, require
from pulsetrain.state.run_state import FORMAT

__all__ = ["upgrade"]

_PARTS_OF_4 = (
    "environment", "settings", "model", "optimizer", "optimizer_type", "backend", "announced_skips", "accumulation",
    "counters", "learning_rates", "grad_norm", "position", "data", "validated_at", "metrics", "history", "losses",
    "strategy", "handlers", "handler_settings", "rng",
)  # fmt: skip


def upgrade(saved: StateDict) -> StateDict:
    """The state in today's format; one that is in it already is returned as it is.

    Raises:
        CheckpointError: it is in a format that this version does not read, or lacks a part.
    """
    number = saved.get("format")
    if number == FORMAT:
        return saved
    if number not in (3, 4):
        raise CheckpointError(
            f"the checkpoint's state is of format {number!r}, this version reads 3 to {FORMAT}; resume with the "
            "version that wrote it, or begin a new run from its weights: model.load_state_dict(checkpoint['model'])"
        )
    if number == 3 and isinstance(saved.get("counters"), Mapping):
        data = {"batches": saved["counters"].get("epoch_length")}
        saved = {**saved, "strategy": None, "handler_settings": dict.fromkeys(saved.get("handlers", {}), "")}
        saved["data"] = data
    require("", saved, _PARTS_OF_4)
    handlers, settings = saved["handlers"], saved["handler_settings"]
    if settings.keys() != handlers.keys():
        odd = ", ".join(sorted(settings.keys() ^ handlers.keys()))
        raise CheckpointError(f"the checkpoint's handlers have a state or settings, not both: {odd}; load another one")
    return {
        "format": FORMAT,
        "made_with": {
            "environment": saved["environment"],
            "settings": saved["settings"],
            "optimizer": saved["optimizer_type"],
            "data": saved["data"],
        },
        "backend": saved["backend"],
        "strategy": saved["strategy"],
        "handlers": {key: {"settings": settings[key], "state": state} for key, state in handlers.items()},
        "model": saved["model"],
        "optimizer": saved["optimizer"],
        "counters": {"rollout_round": 0, **saved["counters"]},  # which was not counted at first
        "stepper": {
            "accumulation": {name: value for name, value in saved["accumulation"].items() if name != "gradients"},
            "gradients": saved["accumulation"]["gradients"],
            "learning_rates": saved["learning_rates"],
            "grad_norm": saved["grad_norm"],
            "grad_norms": saved.get("grad_norms", {}),
        },
        "data": saved["position"],
        "validation": {"validated_at": saved["validated_at"], "metrics": saved["metrics"]},
        "reporter": {
            "losses": saved["losses"],
            "named_losses": saved.get("named_losses", {}),
            "announced_skips": saved["announced_skips"],
            "history": saved["history"],
        },
        "rng": saved["rng"],
    }
