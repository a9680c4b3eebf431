"""The optimizer's part of a run's state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from pulsetrain.engine.backends.model_store import check_optimizer_state
from pulsetrain.engine.distributed.saved_shards import sharded_like
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.logs import get_logger
from pulsetrain.state.part import OwnedPart, StateDict

__all__ = ["OptimizerPart"]


class OptimizerPart(OwnedPart[torch.optim.Optimizer]):
    """The optimizer's state, the rates that the run began with, and the names of parameters in groups added since then.

    Loading reports rates that it changes if this run is configured with other ones than the checkpoint's run.

    Args:
        optimizer: whose state.
        model: whose parameters may be added.
        sets_rates: whether the run is known to set the rates by itself; then nothing is reported.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, sets_rates: Callable[[], bool]) -> None:
        super().__init__(optimizer)
        self._model, self._sets_rates = model, sets_rates
        self._groups = len(optimizer.param_groups)  # of a new run
        self._initial_rates: list[float] | None = None  # of the run, in this process or an earlier one

    def reset(self) -> None:
        """A new run begins with the rates that are set."""
        self._initial_rates = self._rates()

    def state_dict(self) -> StateDict:
        initial = self._rates() if self._initial_rates is None else self._initial_rates
        state: StateDict = {**self._owner.state_dict(), "initial_rates": initial}
        added = self._owner.param_groups[self._groups :]
        if not added:
            return state
        names = {id(each): name for name, each in self._model.named_parameters()}
        return {**state, "added": [[names.get(id(each), "") for each in group["params"]] for group in added]}

    def check_state_dict(self, state: StateDict) -> None:
        """Refuse a state of other parameters; groups that were added to the optimizer since the start may differ.

        Raises:
            CheckpointError: it is one, or has added parameters that are in this optimizer's first groups.
        """
        first, added = self._owner.param_groups[: self._groups], self._added(state)
        check_optimizer_state(self._owner, state, first + added)
        held = {id(each) for group in first for each in group["params"]} if added else set()
        names = {id(each): name for name, each in self._model.named_parameters()} if added else {}
        twice = [names[id(each)] for group in added for each in group["params"] if id(each) in held]
        if twice:  # torch would raise when the group is added, after the model has been loaded
            raise CheckpointError(
                f"the run had added groups to the optimizer with the parameters {', '.join(twice)}, which are in its "
                "first groups here: modules were replaced during the run; replace the modules and add the groups "
                "before train(resume=...)"
            )

    def load_state_dict(self, state: StateDict) -> None:
        configured = self._rates()
        added = self._added(state)
        if len(state["param_groups"]) != len(self._owner.param_groups):
            for group in self._owner.param_groups[self._groups :]:  # which an earlier state did not have yet
                for parameter in group["params"]:
                    self._owner.state.pop(parameter, None)
            del self._owner.param_groups[self._groups :]
            for group in added:
                self._owner.add_param_group(group)
        own = ("added", "initial_rates")
        state_of_parameters = self._shards(state["state"])
        super().load_state_dict(
            {name: value for name, value in state.items() if name not in own} | {"state": state_of_parameters}
        )
        loaded, initial = self._rates(), state.get("initial_rates")  # which older checkpoints lack
        self._initial_rates = configured if initial is None else list(initial)
        others = initial is None or configured[: len(initial)] != initial  # groups may be built that were added there
        if loaded != configured and others and not self._sets_rates():
            get_logger("pulsetrain").warning(
                "the run resumes with the learning rates of its checkpoint; update_optimizer() sets others",
                checkpoint=loaded,
                configured=configured,
            )
            for group, rate in zip(self._owner.param_groups, configured, strict=False):
                group["initial_lr"] = rate  # which has a ratio to the default rate of this optimizer

    def _shards(self, saved: Mapping[int, Mapping[str, Any]]) -> Mapping[int, Mapping[str, Any]]:
        """This rank's shards of the state, where the parameters are shards, and none where it lacks the parameter."""
        parameters = [each for group in self._owner.param_groups for each in group["params"]]
        if not any(hasattr(each, "to_local") or each.is_meta for each in parameters):
            return saved
        return {
            index: {name: sharded_like(value, parameters[index]) for name, value in values.items()}
            for index, values in saved.items()
            if not parameters[index].is_meta
        }

    def _added(self, state: StateDict) -> list[dict[str, Any]]:
        """The groups that were added when the state was saved, with this model's parameters."""
        more = len(state["param_groups"]) - self._groups
        mine = dict(self._model.named_parameters()) if more > 0 else {}
        groups = state.get("added", [])[-more:] if more > 0 else []  # this optimizer may have begun with some of them
        return [{"params": [mine[name] for name in names if name in mine]} for names in groups]

    def _rates(self) -> list[float]:
        """Those of the groups of a new run."""
        return [float(group["lr"]) for group in self._owner.param_groups[: self._groups]]
