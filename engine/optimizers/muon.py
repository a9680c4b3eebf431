"""Muon for the hidden matrices and AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pulsetrain.engine.errors import CheckpointError, ConfigurationError
from pulsetrain.engine.optimizers.groups import Named, exempt_by_kind
from pulsetrain.engine.optimizers.registry import refused

__all__ = ["MuonRule", "MuonWithAdamW", "hidden_matrices", "split_for_muon"]

MuonRule = Callable[[str, nn.Parameter], bool]
"""`rule(name, parameter)`: whether Muon, instead of AdamW, updates the parameter."""

_MARK = "ns_steps"  # every Muon group has it and no AdamW group has it, in saved states too


class MuonWithAdamW(Optimizer):
    """`torch.optim.Muon` over some groups and `torch.optim.AdamW` over the others, with one list of groups.

    A group added later belongs to Muon if it contains `ns_steps`, else to AdamW. torch's global step hooks run for each
    half as well as for the whole.

    >>> model = nn.Linear(4, 4)
    >>> optimizer = MuonWithAdamW([{"params": [model.weight]}], [{"params": [model.bias]}], lr=0.02)
    >>> ["ns_steps" in group for group in optimizer.param_groups]
    [True, False]

    Args:
        matrices: parameter groups for Muon, of shapes (rows, columns).
        others: parameter groups for AdamW.
        lr: for both halves; Muon's `adjust_lr_fn="match_rms_adamw"` scales its updates to the size of AdamW's.
        muon: other keywords of Muon.
        adamw: other keywords of AdamW.

    Raises:
        ConfigurationError: a parameter for Muon is not a matrix.
    """

    def __init__(
        self,
        matrices: Iterable[dict[str, Any]],
        others: Iterable[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float = 0.0,
        muon: Mapping[str, Any] | None = None,
        adamw: Mapping[str, Any] | None = None,
    ) -> None:
        # each half starts with an empty group; add_param_group adds the real ones
        empty: list[dict[str, object]] = [{"params": []}]
        options = {"adjust_lr_fn": "match_rms_adamw", **(muon or {})}
        self._muon = torch.optim.Muon(empty, lr=lr, weight_decay=weight_decay, **options)
        self._adamw = torch.optim.AdamW([{"params": []}], lr=lr, weight_decay=weight_decay, **(adamw or {}))
        marked = [{_MARK: self._muon.defaults[_MARK], **group} for group in matrices]
        super().__init__([*marked, *others], {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both halves; the closure is evaluated once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._link()  # code that moves or shards states may have replaced the groups or the state; takes 1 us
        self._muon.step()
        self._adamw.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        half = self._muon if _MARK in param_group else self._adamw
        super().add_param_group({**half.defaults, **param_group})
        added = self.param_groups[-1]["params"]
        wrong = [tuple(parameter.shape) for parameter in added if parameter.ndim != 2]
        if half is self._muon and wrong:
            del self.param_groups[-1]
            raise ConfigurationError(
                f"Muon updates only matrices, got a parameter of shape {wrong[0]}; give it to AdamW",
                "MuonWithAdamW",
                matrices=...,
            )
        self._link()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a saved state.

        Raises:
            CheckpointError: as `check_state_dict`.
        """
        self.check_state_dict(state_dict)
        super().load_state_dict(state_dict)

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Rejects a state that does not fit, without changing anything.

        Raises:
            CheckpointError: the state's groups differ in kind, order or number of parameters, or a parameter's state
                has a different shape.
        """
        place = "MuonWithAdamW.load_state_dict"
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
            raise CheckpointError("needs what state_dict() returned", place, state_dict=type(state_dict))
        groups = state_dict["param_groups"]
        for what, of in (("param_groups=", _half), ("numbers of parameters=", _size)):
            mine, saved = [of(group) for group in self.param_groups], [of(group) for group in groups]
            if mine != saved:
                raise CheckpointError(
                    f"{place}({what}{saved}): this optimizer has {mine}; create it with the arguments of the saved one"
                )
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        keys = [key for group in groups for key in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            for name, kept in state_dict["state"].get(key, {}).items():
                if name != "step" and isinstance(kept, Tensor) and kept.shape != parameter.shape:
                    raise CheckpointError(
                        f"{place}(state[{key!r}][{name!r}] of shape {tuple(kept.shape)}): this optimizer's parameter "
                        f"has shape {tuple(parameter.shape)}; load it with the model that it was saved with"
                    )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_muon": self._muon, "_adamw": self._adamw}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._link()
        self._adamw.__setstate__({})  # torch adds the keys that groups of its older releases lack

    def _link(self) -> None:
        """Lets both halves use the groups and the state of the whole: the same objects, not copies."""
        for half, name in ((self._muon, "Muon"), (self._adamw, "AdamW")):
            half.state = self.state
            half.param_groups = [group for group in self.param_groups if _half(group) == name]


def hidden_matrices(model: nn.Module) -> MuonRule:
    """The rule that selects matrices other than embeddings, norms and biases, and not of an embedding's shape.

    The last condition excludes output layers that are not tied to the embedding. Hidden matrices that happen to have
    the same shape, for example if the width equals the number of positions, are left to AdamW too.

    >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 8), nn.Linear(4, 10))
    >>> rule = hidden_matrices(model)
    >>> [name for name, parameter in model.named_parameters() if rule(name, parameter)]
    ['1.weight']
    """
    exempt = exempt_by_kind(model)
    embeddings = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    shapes = {module.weight.shape for module in embeddings}

    def rule(name: str, parameter: nn.Parameter) -> bool:
        matrix = parameter.ndim == 2 and parameter.is_floating_point()
        return matrix and parameter.shape not in shapes and not exempt(name, parameter)

    return rule


def split_for_muon(
    model: nn.Module, trainable: Named, rule: MuonRule | None
) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    """The parameters for Muon and those for AdamW, split by the rule or by `hidden_matrices`.

    Raises:
        ConfigurationError: the rule selects a parameter that is not a matrix, or there is none for Muon.
    """
    if rule is not None and not callable(rule):
        raise refused("needs a rule (name, parameter) -> bool, or None", muon_rule=rule)
    picks = hidden_matrices(model) if rule is None else rule
    matrices: list[tuple[str, nn.Parameter]] = []
    others: list[tuple[str, nn.Parameter]] = []
    for name, parameter in trainable:
        (matrices if picks(name, parameter) else others).append((name, parameter))
    for name, parameter in matrices:
        if parameter.ndim != 2:
            raise refused(
                f"picks {name!r} of shape {tuple(parameter.shape)}, and Muon updates only matrices; let the rule "
                "require parameter.ndim == 2",
                muon_rule=...,
            )
    if not matrices:
        raise refused(
            f"{type(model).__name__} has no matrix for Muon among its {len(trainable)} trainable parameters; choose "
            "'adamw', or name matrices with muon_rule=(name, parameter) -> bool",
            name="muon",
        )
    return matrices, others


def _half(group: Mapping[str, object]) -> str:
    return "Muon" if _MARK in group else "AdamW"


def _size(group: Mapping[str, Any]) -> int:
    return len(group["params"])
