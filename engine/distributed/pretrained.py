"""Models of transformers from safetensors files, of which each process reads only what it holds of the model."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pulsetrain.engine.argument_checks import check_type
from pulsetrain.engine.checkpoint.disk import Disk
from pulsetrain.engine.checkpoint.frozen import leave_out_frozen
from pulsetrain.engine.checkpoint.pieces import StoredPiece, StoredTensor
from pulsetrain.engine.checkpoint.safetensors_file import Entry, read_header
from pulsetrain.engine.checkpoint.weights import compare_weights
from pulsetrain.engine.distributed.saved_shards import sharded_like
from pulsetrain.engine.distributed.shards import is_shard
from pulsetrain.engine.errors import CheckpointError, ConfigurationError
from pulsetrain.engine.optional import load_optional

__all__ = ["fill", "move", "pretrained"]

_VALUES = "values_in_files"  # the attribute of a module whose parameters are on the meta device: a tensor by its name
_OF_WEIGHTS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_OF_ADAPTERS = re.compile(r"\b(base_layer|original_module|modules_to_save\.\w+)\.")  # what peft adds to names


def pretrained(
    folder: str | Path,
    *,
    dtype: str | None = None,
    model_class: str = "AutoModelForCausalLM",
    attn_implementation: str | None = None,
    adapters: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A model of transformers whose weights are read when a Trainer has split it up, each process's part alone.

    Its parameters are on the meta device until a Trainer with a TorchBackend gives them values, so that no process
    holds more than it trains: a shard with `Topology(shard=2)`, its part of each layer with `Topology(tensor=2)`, or
    the whole model. The values are those of `from_pretrained`.

    Args:
        folder: on this machine, as `save_pretrained` writes it: config.json and safetensors files.
        dtype: of the weights, such as "bfloat16"; None: that of config.json, or of the files if it names none. What
            transformers keeps in float32 beside weights of half precision is in float32 here as well.
        model_class: the class of transformers that makes the model.
        attn_implementation: such as "sdpa" or "eager".
        adapters: the options of peft's LoraConfig: the model is frozen and left out of checkpoints, and adapters learn
            in its place.

    Raises:
        ConfigurationError: transformers or peft is not installed, or the folder has no such model.
        CheckpointError: a file is missing or damaged, or the files and the model differ in names or shapes.
    """
    transformers: Any = load_optional("pretrained", "transformers", "huggingface")
    config = _config(transformers, Path(folder))
    chosen = getattr(config, "dtype", None) if dtype is None else _dtype(dtype)
    options: dict[str, Any] = {"dtype": _dtype_of_files(Path(folder)) if chosen is None else chosen}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    maker: Any = getattr(transformers, model_class, None)
    if not hasattr(maker, "from_config"):
        raise ConfigurationError(
            "needs a class of transformers with from_config, such as AutoModelForCausalLM",
            "pretrained",
            model_class=model_class,
        )
    with torch.device("meta"):
        model: Any = maker.from_config(config, **options)
    _keep_in_float32(model)
    _compute_buffers(model)
    setattr(model, _VALUES, _values(Path(folder), model))
    if model.can_generate() and (Path(folder) / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    model.eval()
    return model if adapters is None else _with_adapters(model, adapters)


def move(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device, but for the parameters that `fill` gives values.

    Raises:
        ConfigurationError: nothing says where to read the values of a parameter that is on the meta device.
    """
    waiting = {name for name, each in _tensors(module) if each.is_meta}
    if not waiting or device.type == "meta":
        device = torch.empty(0, device=device).device  # with its index
        if any(each.device != device for _, each in _tensors(module)):
            module.to(device)
        return
    found = _waiting_for(module)
    lacking = sorted(name for name in waiting if name not in found)
    if lacking:
        raise ConfigurationError(
            f"{', '.join(lacking[:8])}{' ...' if len(lacking) > 8 else ''} have no values: they are on the meta "
            "device, and nothing says where to read them; make the model on another device, or by "
            "pulsetrain.engine.pretrained(folder)",
            "TorchBackend",
            model=type(module),
        )
    module._apply(lambda each: each if each.is_meta else each.to(device))  # noqa: SLF001  # to() refuses meta tensors


def fill(module: nn.Module, device: torch.device) -> None:
    """Give values to the parameters of models that `pretrained` has made: each process reads what it holds of them.

    The parameters stay the same objects, and nothing is communicated.

    Args:
        module: one of them, or one that has them as parts; it may have been split over several processes since.
        device: where the values are to be.
    """
    if device.type == "meta":
        return
    found = _waiting_for(module)
    with torch.no_grad():
        for name, each in _tensors(module):
            if each.is_meta and name in found:  # of several names, the first
                made: Tensor = _read(found[name], each, device)
                if isinstance(each, nn.Parameter):
                    made = nn.Parameter(made, requires_grad=each.requires_grad)
                torch.utils.swap_tensors(each, made)
    for part in module.modules():
        vars(part).pop(_VALUES, None)


def _read(stored: StoredTensor, like: Tensor, device: torch.device) -> Tensor:
    if is_shard(like):
        value: Tensor = sharded_like(stored, like, device)
    else:
        value = stored.whole()
    return value.to(device=device, dtype=like.dtype)


def _waiting_for(module: nn.Module) -> dict[str, StoredTensor]:
    """What is stored of the tensors of a module, by their names there."""
    found: dict[str, StoredTensor] = {}
    for place, part in module.named_modules():
        stored: Mapping[str, StoredTensor] = vars(part).get(_VALUES, {})
        for name, _ in _tensors(part):
            if (plain := _plain_name(name)) in stored:
                found[f"{place}.{name}" if place else name] = stored[plain]
    return found


def _plain_name(name: str) -> str:
    """The name that a parameter had before peft gave the model adapters.

    >>> _plain_name("layers.0.q_proj.base_layer.weight")
    'layers.0.q_proj.weight'
    """
    return _OF_ADAPTERS.sub("", name)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _config(transformers: Any, folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise ConfigurationError(
            "needs a folder of this machine with config.json and safetensors files, as save_pretrained writes it; "
            "nothing is downloaded, which huggingface_hub.snapshot_download does",
            "pretrained",
            folder=str(folder),
        )
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigurationError(
            "its weights are quantised; load them with from_pretrained in one process",
            "pretrained",
            folder=str(folder),
        )
    return config


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigurationError(
            'needs the name of a floating point type, such as "bfloat16"', "pretrained", dtype=name
        )
    return found


def _dtype_of_files(folder: Path) -> torch.dtype:
    """The type that from_pretrained finds in files without a type in config.json: that of the first weight.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    found: dict[str, torch.dtype] = {name: stored.dtype for name, stored in _stored(folder, first=True)}
    of_weights = [found[name] for name in sorted(found) if found[name] in _OF_WEIGHTS]
    return of_weights[0] if of_weights else torch.float32


def _keep_in_float32(model: Any) -> None:
    """Give parameters and buffers the types that from_pretrained gives those that transformers keeps in float32."""
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(model.config.dtype or torch.get_default_dtype())  # noqa: SLF001  # as from_pretrained
    if not plan:
        return
    rules, patterns, _ = build_glob_alternation(list(plan))
    for name, each in model.state_dict(keep_vars=True).items():
        found = rules.search(name)
        if found is None:
            continue
        made = each.detach().to(plan[patterns[found.lastgroup]])
        if isinstance(each, nn.Parameter):
            made = nn.Parameter(made, requires_grad=each.requires_grad)
        torch.utils.swap_tensors(each, made)


def _values(folder: Path, model: nn.Module) -> dict[str, StoredTensor]:
    """What the files have of the model, by the model's names.

    Raises:
        CheckpointError: they lack something, have something else, or it has another shape.
    """
    mine: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    mine |= {name: each for name, each in model.named_buffers(remove_duplicate=False) if name in model.state_dict()}
    ignored = [re.compile(each) for each in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    renamed = _renaming(model, mine)
    found = {renamed(name): stored for name, stored in _stored(folder)}
    found = {
        name: each for name, each in found.items() if name in mine or not any(rule.search(name) for rule in ignored)
    }
    if problems := compare_weights(mine, found):
        raise CheckpointError(
            f"pretrained({str(folder)!r}): the files do not fit the model of config.json: {problems}; where "
            "transformers converts weights while it loads them, load them by from_pretrained and save them by "
            "save_pretrained(folder, save_original_format=False)"
        )
    by_tensor = {id(mine[name]): stored for name, stored in found.items()}
    return {name: by_tensor[id(each)] for name, each in mine.items()}


def _renaming(model: Any, mine: Mapping[str, Tensor]) -> Callable[[str], str]:
    """From the name of a weight in a file to its name in the model, as from_pretrained has it."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    rules = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
    return lambda name: str(rename_source_key(name, rules, [], model.base_model_prefix, mine)[0])


def _stored(folder: Path, *, first: bool = False) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of the files in a folder, or of the first of these files."""
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    for file in (folder / name for name in (files[:1] if first else files)):
        open_file = partial(Disk().open, file)
        try:
            with open_file() as opened:
                entries, _ = read_header(opened)
        except FileNotFoundError:
            raise CheckpointError(
                f"pretrained({str(folder)!r}): there is no {file.name}; save the model by save_pretrained(folder)"
            ) from None
        except ValueError as error:
            raise CheckpointError(f"{file}: cannot be read as safetensors: {error}") from error
        needed, size = max(map(_end, entries.values()), default=0), file.stat().st_size
        if size < needed:
            raise CheckpointError(f"{file}: has {size} bytes, and its tensors need {needed}; copy it again")
        for name, entry in entries.items():
            start = (0,) * len(entry.shape)
            yield name, StoredTensor(name, entry.shape, entry.dtype, [StoredPiece.of(open_file, entry, start)])


def _end(entry: Entry) -> int:
    return entry.at + math.prod(entry.shape) * entry.dtype.itemsize


def _compute_buffers(model: nn.Module) -> None:
    """Compute the buffers that are not saved, such as rotary frequencies, on the CPU, as from_pretrained does.

    Raises:
        ConfigurationError: transformers does not compute one of them.
    """
    owners: dict[str, Any] = {}  # the model of transformers that a module belongs to
    for name, module in model.named_modules():
        above = owners.get(name.rpartition(".")[0], model)
        owners[name] = module if hasattr(module, "_init_weights") else above
        buffers = [each for each in module._non_persistent_buffers_set if getattr(module, each) is not None]  # noqa: SLF001
        if not buffers:
            continue
        found: list[list[Tensor]] = []
        for fill_value in (0, 1):  # what is computed does not depend on what was there
            for each in buffers:
                setattr(module, each, torch.full_like(getattr(module, each), fill_value, device="cpu"))
            with torch.no_grad(), torch.device("cpu"):
                # parameters are on the meta device, where it changes nothing
                owners[name]._init_weights(module)  # noqa: SLF001  # what from_pretrained calls
            found.append([getattr(module, each) for each in buffers])
        unknown = [each for each, one, other in zip(buffers, *found, strict=True) if not torch.equal(one, other)]
        if unknown:
            raise ConfigurationError(
                f"{type(model).__name__} has buffers that are not saved and that transformers does not compute: "
                f"{', '.join(f'{name}.{each}' for each in unknown)}; load the model with from_pretrained",
                "pretrained",
            )


def _with_adapters(model: nn.Module, options: Mapping[str, Any]) -> nn.Module:
    """The model, frozen, with LoRA adapters whose parameters have their first values."""
    check_type("pretrained", "adapters", options, Mapping, "the options of peft's LoraConfig")
    peft: Any = load_optional("pretrained", "peft", "huggingface")
    config = peft.LoraConfig(**{"task_type": "CAUSAL_LM", **options})
    if config.use_dora or config.init_lora_weights not in (True, "gaussian"):
        raise ConfigurationError(
            "these first values are computed from the weights, which have not been read, or are none; choose "
            "init_lora_weights true or gaussian, without use_dora",
            "pretrained",
            adapters={"init_lora_weights": config.init_lora_weights, "use_dora": config.use_dora},
        )
    adapted: nn.Module = peft.get_peft_model(model, config)
    for layer in adapted.modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            for name, each in layer.named_parameters():
                if each.is_meta and "lora_" in name:  # peft makes them where the weights are
                    made = nn.Parameter(torch.empty_like(each, device="cpu"), requires_grad=each.requires_grad)
                    torch.utils.swap_tensors(each, made)
            layer.reset_lora_parameters("default", config.init_lora_weights)
    return leave_out_frozen(adapted)
