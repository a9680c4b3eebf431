"""Muon for the hidden matrices and AdamW for everything else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pulsetrain.engine.errors import CheckpointError, ConfigurationError
from pulsetrain.engine.optimizers.groups import Named, spared_by_kind

__all__ = ["MuonRule", "MuonWithAdamW", "hidden_matrices", "part_for_muon"]

MuonRule = Callable[[str, nn.Parameter], bool]
"""`rule(name, parameter)`: whether Muon updates the parameter; AdamW does otherwise."""

_MARK = "ns_steps"  # every group of Muon's has it and no group of AdamW's, in saved states too


class MuonWithAdamW(Optimizer):
    """`torch.optim.Muon` over some groups and `torch.optim.AdamW` over the others, behind one list of groups.

    A group that is added later is Muon's if it says so by naming `ns_steps`, else AdamW's. torch's global step hooks
    hear each half as well as the whole.

    Args:
        matrices: parameter groups for Muon, of shapes (rows, columns).
        others: parameter groups for AdamW.
        lr: for both halves; Muon's `adjust_lr_fn="match_rms_adamw"` scales its updates to the size of AdamW's.
        muon: further keywords of Muon.
        adamw: further keywords of AdamW.

    Raises:
        ConfigurationError: a parameter for Muon that is no matrix.
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
        # each begins with an empty group; add_param_group hands them theirs
        empty: list[dict[str, Any]] = [{"params": []}]
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
        self._link()  # whoever moves or shards states may have put other groups or another state here; costs 1 us
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
                f"MuonWithAdamW(matrices=...): Muon takes matrices alone, got a parameter of shape {wrong[0]}; "
                "give it to AdamW"
            )
        self._link()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another left off.

        Raises:
            CheckpointError: as `check_state_dict`.
        """
        self.check_state_dict(state_dict)
        super().load_state_dict(state_dict)

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a state that does not fit, and change nothing.

        Raises:
            CheckpointError: the state's groups are not Muon's and AdamW's in the same order, over as many parameters
                each, or what it keeps of a parameter has another shape.
        """
        place = "MuonWithAdamW.load_state_dict"
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
            raise CheckpointError("needs what state_dict() returned", place, state_dict=type(state_dict))
        groups = state_dict["param_groups"]
        for what, of in (("param_groups=", _half), ("numbers of parameters=", _size)):
            mine, saved = [of(group) for group in self.param_groups], [of(group) for group in groups]
            if mine != saved:
                raise CheckpointError(
                    f"{place}({what}{saved}): this optimizer has {mine}; "
                    "make it with the arguments that the saved one was made with"
                )
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        keys = [key for group in groups for key in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            for name, kept in state_dict["state"].get(key, {}).items():
                if name != "step" and isinstance(kept, Tensor) and kept.shape != parameter.shape:
                    raise CheckpointError(
                        f"{place}(state[{key!r}][{name!r}] of shape {tuple(kept.shape)}): this optimizer's parameter "
                        f"has shape {tuple(parameter.shape)}; load it over the model that it was saved with"
                    )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_muon": self._muon, "_adamw": self._adamw}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._link()
        self._adamw.__setstate__({})  # torch fills in what the groups of its older releases lack

    def _link(self) -> None:
        """Both halves work on the groups and the state of the whole: these very objects, not copies."""
        for half, name in ((self._muon, "Muon"), (self._adamw, "AdamW")):
            half.state = self.state
            half.param_groups = [group for group in self.param_groups if _half(group) == name]


def hidden_matrices(model: nn.Module) -> MuonRule:
    """The rule for what Muon is meant for: matrices that are no embedding, norm or bias, nor of an embedding's shape.

    An output layer that is not tied to the embedding has its shape; hidden matrices that happen to have it too, those
    of a width that equals the number of positions, say, stay with AdamW.
    """
    spared = spared_by_kind(model)
    embeddings = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    shapes = {module.weight.shape for module in embeddings}

    def rule(name: str, parameter: nn.Parameter) -> bool:
        matrix = parameter.ndim == 2 and parameter.is_floating_point()
        return matrix and parameter.shape not in shapes and not spared(name, parameter)

    return rule


def part_for_muon(
    model: nn.Module, trainable: Named, rule: MuonRule | None
) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    """The parameters for Muon and those for AdamW, by the rule or by `hidden_matrices`.

    Raises:
        ConfigurationError: the rule picks something that is no matrix, or nothing is left for Muon.
    """
    if rule is not None and not callable(rule):
        raise ConfigurationError("needs a rule (name, parameter) -> bool, or None", "create_optimizer", muon_rule=rule)
    picks = hidden_matrices(model) if rule is None else rule
    matrices: list[tuple[str, nn.Parameter]] = []
    others: list[tuple[str, nn.Parameter]] = []
    for name, parameter in trainable:
        (matrices if picks(name, parameter) else others).append((name, parameter))
    for name, parameter in matrices:
        if parameter.ndim != 2:
            raise ConfigurationError(
                f"picks {name!r} of shape {tuple(parameter.shape)}, and Muon takes matrices alone; let the rule ask "
                "for parameter.ndim == 2",
                "create_optimizer",
                muon_rule=...,
            )
    if not matrices:
        raise ConfigurationError(
            f"{type(model).__name__} has no matrix for Muon among its {len(trainable)} trainable parameters; choose "
            "'adamw', or name matrices with muon_rule=(name, parameter) -> bool",
            "create_optimizer",
            name="muon",
        )
    return matrices, others


def _half(group: Mapping[str, Any]) -> str:
    return "Muon" if _MARK in group else "AdamW"


def _size(group: Mapping[str, Any]) -> int:
    return len(group["params"])
