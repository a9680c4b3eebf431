"""Which layers of a model several processes compute together, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from pulsetrain.engine.argument_checks import check_type
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.module_names import names_like

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

__all__ = ["TensorPlan", "styles_of"]

TensorPlan = Mapping[str, Any]
"""Names of modules, in which `*` is anything between two dots, to how they are split.

A value is "colwise", "rowwise", "embedding_rowwise" (splits the vocabulary), "replicated" (each process computes with
its part of the features, as a norm of each head does), "sequence" (computes each position by itself), "sequence_split"
(its outputs are split along the sequence), a mapping such as {"style": "colwise", "parts": 3, "units": 12,
"gather": True}, whose options are those of `Colwise`, or a `ParallelStyle` of torch.
"""

_EXAMPLE = (
    '{"blocks.*.attention.qkv": {"style": "colwise", "parts": 3, "units": heads}, "blocks.*.attention.out": "rowwise", '
    '"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}'
)
_OF_TRANSFORMERS: dict[str, dict[str, Any]] = {  # names of styles in plans of transformers
    "colwise": {"style": "colwise"},
    "rowwise": {"style": "rowwise"},
    "colwise_gather_output": {"style": "colwise", "gather": True},
    "colwise_rep": {"style": "colwise", "gather": True},
}

# without options; the second and third: each process uses the module on its part, and the gradients are added up
_FIXED = ("embedding_rowwise", "replicated", "replicated_with_grad_allreduce")


def styles_of(
    module: nn.Module, given: TensorPlan | None, count: int, *, sequence: bool = False
) -> dict[str, ParallelStyle]:
    """The styles by the names of modules: of the plan that was given, else of the model's own.

    A model's own plan is its attribute `tensor_plan`, or that of a model of transformers. A layer is left whole if it
    shares its weight with another one, such as a head that is tied to the embedding.

    Args:
        module: the model.
        given: the plan, if the caller has one.
        count: processes.
        sequence: whether what lies between the layers is split along the sequence.

    Raises:
        ConfigurationError: there is no plan, or it does not fit the model.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    >>> styles_of(model, {"0": "colwise", "2": "rowwise"}, count=2)
    {'0': Colwise(parts=1, units=None, gather=False, sequence=False), '2': Rowwise(sequence=False)}
    """
    own = given or getattr(module, "tensor_plan", None)
    adapted = _first_of_peft(module)
    if not own and adapted is not None:
        raise _of_peft(module, adapted, count)
    plan = own or _of_transformers(module, count)
    check_type("TorchBackend", "tensor_plan", plan, Mapping | None, "a mapping from names of modules to styles")
    if not plan:
        layers = [name for name, each in module.named_modules() if isinstance(each, nn.Linear)]
        raise ConfigurationError(
            f"{type(module).__name__} has no plan that says which layers several processes compute together; give it "
            f"an attribute tensor_plan, or TorchBackend(tensor_plan=...), such as {_EXAMPLE}. Its linear layers are "
            f"{', '.join(layers[:8]) or 'none'}{' ...' if len(layers) > 8 else ''}",
            "Topology",
            tensor=count,
        )
    if sequence and "sequence_split" not in plan.values():
        raise ConfigurationError(
            f"the plan of {type(module).__name__} does not say where the sequence is split: it needs a module with "
            '"sequence_split", such as the embedding, and "sequence" for modules such as normalisations',
            "Topology",
            sequence_parallel=True,
        )
    tied = _tied(module)
    found: dict[str, ParallelStyle] = {}
    for pattern, value in plan.items():
        modules = names_like(module, pattern)
        if not own and (not modules or _is_unknown(value)):
            raise ConfigurationError(
                f"the plan that transformers has for {type(module).__name__} is not supported: it has {value!r} for "
                f"{pattern!r}; pass a plan of your own as TorchBackend(tensor_plan=...)",
                "Topology",
                tensor=count,
            )
        if not modules and adapted is not None:  # which peft has given other names
            raise _of_peft(module, adapted, count)
        if not modules:
            names = [name for name, _ in module.named_modules() if name]
            raise ConfigurationError(
                f"no module of {type(module).__name__} has such a name; there are {', '.join(names[:8])}"
                f"{' ...' if len(names) > 8 else ''}",
                "TorchBackend",
                tensor_plan=pattern,
            )
        style = _style(pattern, value, sequence)
        if style is None:
            continue
        if sequence and (shared := [name for name in modules if name in tied]):
            raise ConfigurationError(
                f"{shared[0]!r} shares a parameter with another module, so it cannot be split along the sequence; use "
                "weights of its own, or leave sequence_parallel out",
                "Topology",
                sequence_parallel=True,
            )
        found.update({name: _checked(module, name, style, count) for name in modules if name not in tied})
    return found


def _is_unknown(value: object) -> bool:
    """Whether transformers has a style of this name that is not known here."""
    return isinstance(value, str) and value not in (*_OF_TRANSFORMERS, *_FIXED)


def _style(pattern: str, value: Any, sequence: bool) -> ParallelStyle | None:
    """The style of a plan's entry; None if it says nothing where the sequence is not split."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel

    from pulsetrain.engine.distributed.tensor_parallel import Colwise, Rowwise, SequencePlain, SequenceSplit

    if isinstance(value, ParallelStyle):
        return value
    if isinstance(value, str) and value in _FIXED:
        return RowwiseParallel(input_layouts=Replicate()) if value == "embedding_rowwise" else SequencePlain()
    options = dict(value if isinstance(value, Mapping) else _OF_TRANSFORMERS.get(value, {"style": value}))
    made: dict[object, Callable[..., ParallelStyle]] = {"colwise": Colwise, "rowwise": Rowwise}
    style = options.pop("style", None)
    try:
        if style in ("sequence", "sequence_split") and not options:
            return (SequencePlain if style == "sequence" else SequenceSplit)() if sequence else None
        return made[style](**options, sequence=sequence)
    except (KeyError, TypeError):
        raise ConfigurationError(
            'is not a way to split a layer; choose "colwise", "rowwise", "sequence", "sequence_split", a mapping with '
            "a style and its options (parts, units, gather), or a ParallelStyle of torch",
            "TorchBackend",
            tensor_plan={pattern: value},
        ) from None


def _checked(module: nn.Module, name: str, style: ParallelStyle, count: int) -> ParallelStyle:
    from pulsetrain.engine.distributed.tensor_parallel import Colwise, Rowwise

    layer = module.get_submodule(name)
    is_linear = type(layer) is nn.Linear or type(layer).__name__ == "Conv1D"  # of transformers' GPT-2
    if isinstance(style, (Colwise, Rowwise)) and _is_of_peft(layer):
        raise _of_peft(module, name, count)
    if isinstance(style, (Colwise, Rowwise)) and not is_linear:
        raise ConfigurationError(
            f"{name!r} is a {type(layer).__name__}, and only linear layers are split by this style; name another "
            "module, or give it a ParallelStyle of torch",
            "TorchBackend",
            tensor_plan=name,
        )
    others = {each for each, _ in layer.named_parameters(recurse=False)} - {"weight", "bias"}
    if isinstance(style, (Colwise, Rowwise)):
        if others:
            raise ConfigurationError(
                f"{name!r} has a parameter {min(others)!r}, and only layers of weight and bias are split; leave it out",
                "TorchBackend",
                tensor_plan=name,
            )
        style.check(name, layer, count)
    return style


def _is_of_peft(layer: nn.Module) -> bool:
    return type(layer).__module__.partition(".")[0] == "peft" and hasattr(layer, "base_layer")


def _first_of_peft(module: nn.Module) -> str | None:
    """The first layer in whose place peft has put one with adapters."""
    return next((name for name, each in module.named_modules() if _is_of_peft(each)), None)


def _of_peft(module: nn.Module, name: str, count: int) -> ConfigurationError:
    return ConfigurationError(
        f"{name!r} of {type(module).__name__} is a layer of peft with adapters, which is not split; give each process "
        "whole layers, as shard=2 in place of tensor=2 does, or train all weights, without adapters",
        "Topology",
        tensor=count,
    )


def _of_transformers(module: nn.Module, count: int) -> TensorPlan | None:
    """The plan of a model of transformers."""
    config: Any = getattr(module, "config", None)
    heads, shared = (getattr(config, f"num_{each}_heads", None) for each in ("attention", "key_value"))
    for name, number in (("num_attention_heads", heads), ("num_key_value_heads", shared)):
        if isinstance(number, int) and number % count:
            raise ConfigurationError(
                f"the model has {name}={number}, which {count} processes cannot split evenly", "Topology", tensor=count
            )
    if getattr(config, "model_type", None) == "gpt2":
        return _of_gpt2(module, heads)
    return getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)


def _of_gpt2(module: nn.Module, heads: int | None) -> TensorPlan:
    """The plan of GPT-2, for which transformers has none."""
    blocks = "transformer.h.*" if hasattr(module, "transformer") else "h.*"
    return {
        f"{blocks}.attn.c_attn": {"style": "colwise", "parts": 3, "units": heads},
        f"{blocks}.attn.c_proj": "rowwise",
        f"{blocks}.mlp.c_fc": "colwise",
        f"{blocks}.mlp.c_proj": "rowwise",
    }


def _tied(module: nn.Module) -> set[str]:
    """The modules that share a parameter with another one."""
    owners: dict[int, list[str]] = {}
    for name, each in module.named_modules():
        for parameter in each.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    return {name for names in owners.values() if len(names) > 1 for name in names}
