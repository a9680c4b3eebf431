"""The methods of a LightningModule that ask its trainer, with what they do on ours."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pulsetrain.adapters.lightning_steps import ModuleHooks
from pulsetrain.adapters.lightning_view import ModuleView
from pulsetrain.engine.errors import ConfigurationError

__all__ = ["ModuleMethods", "OptimizerView", "put_methods_into"]


class OptimizerView:
    """An optimizer as manual optimization finds it: torch's, with `optimizer` and `toggle_model`."""

    optimizer: Optimizer

    def __init__(self, optimizer: Optimizer, methods: ModuleMethods) -> None:
        self.optimizer, self._methods = optimizer, methods

    def step(self, closure: Any = None, **options: Any) -> Any:
        """One step of the optimizer."""
        return self.optimizer.step(closure, **options) if closure is not None else self.optimizer.step(**options)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """A block in which only this optimizer's parameters require gradients."""
        self._methods.toggle_optimizer(self)
        try:
            yield
        finally:
            self._methods.untoggle_optimizer(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)


class ModuleMethods:
    """Methods of a LightningModule that ask its trainer."""

    def __init__(self, module: Any, view: ModuleView, hooks: ModuleHooks) -> None:
        self._module, self._view, self._hooks = module, view, hooks
        self._required: dict[nn.Parameter, bool] = {}  # before an optimizer was toggled

    def log(self, *arguments: Any, **options: Any) -> None:
        self._hooks.log.log(*arguments, **options)

    def log_dict(self, *arguments: Any, **options: Any) -> None:
        self._hooks.log.log_dict(*arguments, **options)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        made = self._view.made
        found: list[Any] = [OptimizerView(each, self) for each in made] if use_pl_optimizer else list(made)
        return found[0] if len(found) == 1 else found

    def lr_schedulers(self) -> Any:
        found = [each.scheduler for each in self._hooks.schedulers]
        return None if not found else found[0] if len(found) == 1 else found

    def manual_backward(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        if self._module.automatic_optimization:
            rule = "manual_backward: set self.automatic_optimization = False, or return the loss from training_step"
            raise ConfigurationError(f"{type(self._module).__name__}: {rule}")
        loss.backward(*arguments, **options)
        self._hooks.losses.append(loss.detach())

    def toggle_optimizer(self, optimizer: Any) -> None:
        everything = [each for made in self._view.made for group in made.param_groups for each in group["params"]]
        self._required = {each: each.requires_grad for each in everything}
        mine = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for each, required in self._required.items():
            each.requires_grad = required and id(each) in mine

    def untoggle_optimizer(self, optimizer: Any) -> None:
        for each, required in self._required.items():
            each.requires_grad = required
        self._required = {}

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if gradient_clip_val is None:
            return
        if gradient_clip_algorithm == "value":
            nn.utils.clip_grad_value_(parameters, gradient_clip_val)
        elif gradient_clip_algorithm in (None, "norm"):
            nn.utils.clip_grad_norm_(parameters, gradient_clip_val)
        else:
            rule = "choose 'norm' or 'value'"
            raise ConfigurationError(rule, "clip_gradients", gradient_clip_algorithm=gradient_clip_algorithm)


def put_methods_into(module: nn.Module) -> None:
    """Let the methods of the module, and of LightningModules in it, be those of its trainer where that is ours."""
    for each in module.modules():
        if any(kind.__name__ == "LightningModule" for kind in type(each).__mro__):
            vars(each).update({name: types.MethodType(method, each) for name, method in _DELEGATES.items()})


def _delegate(name: str) -> Callable[..., Any]:
    def method(module: Any, *arguments: Any, **options: Any) -> Any:
        view = module.trainer
        if isinstance(view, ModuleView):
            return getattr(view.methods, name)(*arguments, **options)
        return getattr(type(module), name)(module, *arguments, **options)  # Lightning's own trainer has it now

    method.__name__ = name
    return method


_DELEGATES = {
    name: _delegate(name)
    for name in (
        "log", "log_dict", "optimizers", "lr_schedulers", "manual_backward", "toggle_optimizer", "untoggle_optimizer",
        "clip_gradients",
    )
}  # fmt: skip
