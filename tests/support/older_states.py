"""The state of a trainer as earlier versions wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def downgraded(state: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A state of format 5 as format 3 or 4 had it."""
    made_with, stepper, reporter = state["made_with"], state["stepper"], state["reporter"]
    older = {
        "format": number,
        **{name: made_with[name] for name in ("environment", "settings", "data")},
        "optimizer_type": made_with["optimizer"],
        **{name: state[name] for name in ("model", "optimizer", "backend", "counters", "strategy", "rng")},
        "accumulation": {**stepper["accumulation"], "gradients": stepper["gradients"]},
        "learning_rates": stepper["learning_rates"],
        "grad_norm": stepper["grad_norm"],
        "position": state["data"],
        **state["validation"],
        **{name: reporter[name] for name in ("announced_skips", "history", "losses")},
        "handlers": {key: entry["state"] for key, entry in state["handlers"].items()},
        "handler_settings": {key: entry["settings"] for key, entry in state["handlers"].items()},
    }
    if reporter["named_losses"]:  # a run with one optimizer has none
        older |= {"named_losses": reporter["named_losses"], "grad_norms": stepper["grad_norms"]}
    if number == 3:
        for name in ("strategy", "handler_settings", "data"):
            del older[name]
    return older
