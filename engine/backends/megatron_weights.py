"""Weights of a Megatron model in the layout of transformers' Llama, and back: plain functions of state dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pulsetrain.engine.backends.megatron_models import MegatronGPT, megatron_llama
from pulsetrain.engine.distributed.saved_shards import sharded_like
from pulsetrain.engine.distributed.shards import is_shard
from pulsetrain.engine.errors import ConfigurationError

__all__ = ["describe_llama", "from_llama", "load_llama", "to_llama"]

_EMBEDDING, _NORM, _OUTPUT = (
    ("gpt.embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    ("gpt.decoder.final_layernorm.weight", "model.norm.weight"),
    ("gpt.output_layer.weight", "lm_head.weight"),
)
_LAYERS = (  # the names that differ alone
    ("input_layernorm.weight", "input_layernorm.weight"),
    ("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    ("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    ("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
)
_QKV, _GATED = "self_attention.linear_qkv.weight", "mlp.linear_fc1.weight"
_HEADS = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
_INNER = ("mlp.gate_proj.weight", "mlp.up_proj.weight")


def describe_llama(config: Any) -> MegatronGPT:
    """The description of a model with the architecture of a `transformers.LlamaConfig`.

    Raises:
        ConfigurationError: it has biases, scaled positions, or heads of another width than hidden / heads.
    """
    unfit: dict[str, object] = {
        name: getattr(config, name) for name in ("attention_bias", "mlp_bias") if getattr(config, name, False)
    }
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": getattr(config, "rope_theta", 10000.0)}
    if rope.get("rope_type", "default") != "default":
        unfit["rope_type"] = rope["rope_type"]
    width = getattr(config, "head_dim", None)
    if width is not None and width * config.num_attention_heads != config.hidden_size:
        unfit["head_dim"] = width
    if config.hidden_act != "silu":
        unfit["hidden_act"] = config.hidden_act
    if unfit:
        raise ConfigurationError("not supported; use a model without it", "describe_llama", **unfit)
    return megatron_llama(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        groups=config.num_key_value_heads,
        vocabulary=config.vocab_size,
        context=config.max_position_embeddings,
        feed_forward=config.intermediate_size,
        norm_epsilon=config.rms_norm_eps,
        rotary_base=round(rope["rope_theta"]),
        tied=config.tie_word_embeddings,
    )


def to_llama(state: Mapping[str, Tensor], description: MegatronGPT) -> dict[str, Tensor]:
    """The weights under the names and in the shapes of `transformers.LlamaForCausalLM`.

    Args:
        state: of a model that `MegatronBackend` built. Shards are gathered: then all processes call this.
        description: what it was built from.

    Raises:
        ConfigurationError: it is not of Llama's architecture.
    """
    _check(description, "to_llama")
    whole = {name: each.full_tensor() if is_shard(each) else each for name, each in state.items()}  # type: ignore[attr-defined]
    made = {theirs: whole[mine] for mine, theirs in _pairs(description) if mine in whole}
    if description.tied:
        made[_OUTPUT[1]] = whole[_EMBEDDING[0]]
    groups, each = description.key_value_heads, description.heads // description.key_value_heads
    width = description.hidden // description.heads
    for mine, theirs in _layers(description):
        rows = whole[mine + _QKV].unflatten(0, (groups, each + 2, width))
        parts = rows[:, :each].flatten(0, 2), rows[:, each].flatten(0, 1), rows[:, each + 1].flatten(0, 1)
        made |= dict(zip((theirs + name for name in _HEADS), parts, strict=True))
        made |= dict(zip((theirs + name for name in _INNER), whole[mine + _GATED].chunk(2), strict=True))
    return made


def from_llama(state: Mapping[str, Tensor], description: MegatronGPT) -> dict[str, Tensor]:
    """The inverse of `to_llama`: whole tensors under the names of a model that `MegatronBackend` builds.

    Raises:
        ConfigurationError: the description is not of Llama's architecture, or the state lacks a weight.
    """
    _check(description, "from_llama")
    pairs = [each for each in _pairs(description) if not (description.tied and each == _OUTPUT)]
    wanted = [theirs for _, theirs in pairs]
    wanted += [theirs + name for _, theirs in _layers(description) for name in (*_HEADS, *_INNER)]
    lacking = [name for name in wanted if name not in state]
    if lacking:
        raise ConfigurationError(
            f"from_llama(): the state lacks {', '.join(lacking[:3])}{' ...' if len(lacking) > 3 else ''}; pass that of "
            "a LlamaForCausalLM, and a description of as many layers"
        )
    known = {*wanted, _OUTPUT[1]}  # the latter of a model that ties it
    surplus = sorted(name for name in state if name not in known and not name.endswith("rotary_emb.inv_freq"))
    if surplus:
        first = f"{', '.join(surplus[:3])}{' ...' if len(surplus) > 3 else ''}"
        raise ConfigurationError(
            f"from_llama(): the description has no place for {first}; pass the state of a "
            "LlamaForCausalLM, and a description of as many layers"
        )
    made = {mine: state[theirs] for mine, theirs in pairs}
    groups, width = description.key_value_heads, description.hidden // description.heads
    for mine, theirs in _layers(description):
        rows = [state[theirs + name].unflatten(0, (groups, -1, width)) for name in _HEADS]
        made[mine + _QKV] = torch.cat(rows, dim=1).flatten(0, 2)
        made[mine + _GATED] = torch.cat([state[theirs + name] for name in _INNER])
    return made


def load_llama(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load weights of a LlamaForCausalLM into a model that `MegatronBackend.build` made; all processes call this.

    Each process keeps its part of each weight.
    """
    description: Any = model.config
    own = model.state_dict()
    whole = from_llama(state, description)
    model.load_state_dict({name: sharded_like(each.to(own[name].dtype), own[name]) for name, each in whole.items()})


def _check(description: MegatronGPT, place: str) -> None:
    wanted = {"norm": "rms", "positions": "rotary", "gated": True, "bias": False}
    unfit = {name: getattr(description, name) for name in wanted if getattr(description, name) != wanted[name]}
    if unfit:
        raise ConfigurationError("is not Llama's architecture; see megatron_llama", place, **unfit)


def _pairs(description: MegatronGPT) -> list[tuple[str, str]]:
    layers = _layers(description)
    return [_EMBEDDING, _NORM, _OUTPUT] + [(a + mine, b + theirs) for a, b in layers for mine, theirs in _LAYERS]


def _layers(description: MegatronGPT) -> list[tuple[str, str]]:
    return [(f"gpt.decoder.layers.{at}.", f"model.layers.{at}.") for at in range(description.layers)]
