"""Which modules of a model each part of a pipeline has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pulsetrain.engine.errors import ConfigurationError

__all__ = ["PipelinePlan", "Span", "check_parts", "find_plan"]

_PLACE = "Topology"


class Span(NamedTuple):
    """Neighbouring blocks: those from `start` to before `end`."""

    start: int
    end: int


class PipelinePlan(NamedTuple):
    """The modules of a model with parameters, by their names, in the order in which they compute."""

    before: tuple[str, ...]
    blocks: tuple[str, ...]
    after: tuple[str, ...]

    def spans(self, parts: int, processes: int | None = None) -> list[Span]:
        """The blocks of each of so many equal parts.

        Args:
            parts: one after the other.
            processes: that have them in turns; by default one each.

        >>> PipelinePlan(("embed",), ("a", "b", "c", "d"), ("head",)).spans(2)
        [Span(start=0, end=2), Span(start=2, end=4)]

        Raises:
            ConfigurationError: they do not divide.
        """
        size, rest = divmod(len(self.blocks), parts)
        if rest or not size:
            processes = processes or parts
            several = processes != parts
            raise ConfigurationError(
                f"the {len(self.blocks)} layers from {self.blocks[0]!r} on cannot be split into {parts} equal parts"
                f"{f', {parts // processes} for each process' if several else ''}; choose another number of processes"
                f"{', or a schedule with one part for each,' if several else ','} or give the model another number of "
                "layers",
                _PLACE,
                pipeline=processes,
                **({"schedule": "interleaved"} if several else {}),
            )
        return [Span(at * size, (at + 1) * size) for at in range(parts)]

    def names(self, span: Span) -> tuple[str, ...]:
        """The modules of a part: its blocks, in the first part also what is before them, in the last what is after."""
        before = self.before if span.start == 0 else ()
        after = self.after if span.end == len(self.blocks) else ()
        return before + self.blocks[span.start : span.end] + after


def find_plan(model: nn.Module, path: str | None = None) -> PipelinePlan:
    """The plan of a model whose layers are in one list.

    The modules that are registered before the list, beside it or further out, compute before the layers, the others
    after them.

    Args:
        model: the whole model.
        path: of the list; by default that of the model's `pipeline_plan`, or of the plan in the configuration of a
            model of transformers. The children of a Sequential are its layers.

    >>> find_plan(nn.Sequential(nn.Linear(2, 2), nn.Tanh())).blocks
    ('0', '1')

    Raises:
        ConfigurationError: there is none, or it does not fit the model.
    """
    found = _path(model) if path is None else path
    if found is None:
        raise ConfigurationError(
            f"{type(model).__name__} does not say which layers a process can have: give it an attribute pipeline_plan "
            "with the path of its list of layers, as pipeline_plan = 'blocks', or name the path here, as "
            "blocks='model.layers'",
            _PLACE,
            blocks=None,
        )
    modules = dict(model.named_modules())
    if found not in modules or not list(modules[found].children()):
        raise ConfigurationError(
            f"{type(model).__name__} has no list of modules of this name; "
            f"there are: {', '.join(_lists(model)) or 'none'}",
            _PLACE,
            blocks=found,
        )
    before: list[str] = []
    after: list[str] = []
    module, prefix = model, ""
    for step in found.split(".") if found else []:
        _check_direct(module, prefix)
        later: list[str] = []
        side = before
        for name, child in module.named_children():
            if name == step:
                side = later
            elif any(True for _ in child.parameters()):
                side.append(prefix + name)
        after = later + after
        module, prefix = module.get_submodule(step), f"{prefix}{step}."
    _check_direct(module, prefix)
    children = [name for name, _ in module.named_modules(remove_duplicate=False) if name and "." not in name]
    if len(children) != len(list(module.children())):
        raise ConfigurationError(
            f"{type(model).__name__} has a layer twice; give each place a layer of its own, or leave the pipeline out",
            _PLACE,
            pipeline=...,
        )
    return PipelinePlan(tuple(before), tuple(prefix + name for name in children), tuple(after))


def check_parts(model: nn.Module, parts: Mapping[str, int], processes: int) -> None:
    """Refuse a model with a part without parameters, a parameter of two processes or without values, or BatchNorm.

    Args:
        model: the whole model.
        parts: the part of each module of the plan.
        processes: of the pipeline, to which the parts go in turns.

    Raises:
        ConfigurationError: it is one.
    """
    norms = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if norms:
        raise ConfigurationError(
            f"{norms[0]} is a BatchNorm, which would normalise each part of a batch by itself, with the rows that fill "
            "the last part up; use another normalisation, as LayerNorm or GroupNorm",
            _PLACE,
            pipeline=processes,
        )
    held: dict[int, tuple[int, str]] = {}
    for module, part in parts.items():
        for name, each in model.get_submodule(module).named_parameters(module):
            other, first = held.setdefault(id(each), (part, name))
            if other % processes != part % processes:
                raise ConfigurationError(
                    f"{first} and {name} are one parameter, and two processes of the pipeline would have it; give "
                    "each module its own, or leave the pipeline out",
                    _PLACE,
                    pipeline=processes,
                )
    empty = [name for name, each in model.named_parameters() if each.is_meta]
    if empty:
        raise ConfigurationError(
            f"{empty[0]} is on the meta device, without values; make the model on the CPU, from where each process "
            "takes its layers",
            _PLACE,
            pipeline=processes,
        )
    filled = {part for part, _ in held.values()}
    for idle in dict.fromkeys(part for part in parts.values() if part not in filled):
        names = [module for module, part in parts.items() if part == idle]
        raise ConfigurationError(
            f"a process of the pipeline would have {', '.join(names)} alone, without a parameter; choose fewer "
            "processes, or put these layers together with others",
            _PLACE,
            pipeline=processes,
        )


def _path(model: nn.Module) -> str | None:
    given = getattr(model, "pipeline_plan", None)
    if given is None and isinstance(model, nn.Sequential):
        return ""
    if given is not None:
        if not isinstance(given, str):
            raise ConfigurationError(
                "needs the path of the list of layers, as 'blocks'", type(model).__name__, pipeline_plan=given
            )
        return given
    plan = getattr(getattr(model, "config", None), "base_model_pp_plan", None) or ()
    base, modules = getattr(model, "base_model_prefix", ""), dict(model.named_modules())
    names = [f"{prefix}{name}" for name in plan for prefix in (f"{base}.", "")]
    return next((name for name in names if isinstance(modules.get(name), nn.ModuleList)), None)


def _lists(model: nn.Module) -> Iterator[str]:
    kinds: Any = (nn.ModuleList, nn.Sequential)
    return (repr(name) for name, each in model.named_modules() if isinstance(each, kinds) and name)


def _check_direct(module: nn.Module, prefix: str) -> None:
    """Refuse parameters beside the layers: it cannot be known which process computes with them."""
    direct = [name for name, _ in module.named_parameters(recurse=False)]
    if direct:
        raise ConfigurationError(
            f"{prefix}{direct[0]} is a parameter of {type(module).__name__} itself, so that it is not known which "
            "process of the pipeline needs it; put it into a module of its own",
            _PLACE,
            pipeline=...,
        )
